"""The messages of v1 as services read and write them: what they only forward is bytes. Generated from protos/."""
