"""Starts, supervises and scales servers, on this machine or on a Ray cluster."""
