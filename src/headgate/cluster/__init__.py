"""Where engines live: servers as processes of this machine."""
