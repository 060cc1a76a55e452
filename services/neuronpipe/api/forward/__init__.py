"""The messages of v1 that services read. Messages that they only forward stay bytes. Generated from protos/."""
