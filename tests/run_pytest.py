"""Main program of each Bazel test: hands the file that Bazel names over to pytest."""

import sys

import pytest

if __name__ == "__main__":
    sys.exit(pytest.main(["-p", "no:cacheprovider", *sys.argv[1:]]))
