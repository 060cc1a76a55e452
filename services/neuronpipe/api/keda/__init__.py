"""The messages of KEDA's external scaler protocol. Generated from protos/."""
