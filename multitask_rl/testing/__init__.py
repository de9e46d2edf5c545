"""What plugin authors test with: contract suites and public fakes."""
