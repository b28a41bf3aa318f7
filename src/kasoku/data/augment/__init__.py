"""What varies training images, and how many and how large they are; no draw depends on an earlier one."""
