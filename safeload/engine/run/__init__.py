"""Files, and the jobs that read, write and convert their bytes on threads."""
