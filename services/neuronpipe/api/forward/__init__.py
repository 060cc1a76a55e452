"""The messages of api/ as services read and write them: what they only forward is bytes. Generated from protos/."""
