"""What verl's HTTP adapter imports of SGLang, whose own modules need GPU kernels. None of it sends or reads a request."""
