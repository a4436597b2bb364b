"""What ranks add to pytest's XML report."""
