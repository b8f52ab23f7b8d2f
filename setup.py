"""Entry point for tools that look for a setup.py; everything is said in pyproject.toml."""

from setuptools import setup

setup()
