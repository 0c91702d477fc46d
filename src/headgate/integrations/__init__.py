"""Plug-ins for training frameworks. A framework imports them; Headgate itself never does, and depends on none of them."""
