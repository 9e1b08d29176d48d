"""What torch writes: zip archives, files of before torch 1.6, packages."""
