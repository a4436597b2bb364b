"""Claims about meshes of data parallelism and tensor parallelism."""
