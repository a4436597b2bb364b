"""Test classes of other projects, run unchanged on ranks. Imported only where `ranks_adopt` is set."""
