"""Files, and jobs to read, write and convert their bytes on threads."""
