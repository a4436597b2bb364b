"""Claims about engines that shard or replicate models; installed, the package is `lockstep_suites`."""
