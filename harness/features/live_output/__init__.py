"""Output of ranks shown while a test runs: live logs, records for `--log-file`, and `--setup-show`."""
