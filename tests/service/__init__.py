"""The whole service: real threads, the real CPU engine, and engines that wait for the test."""
