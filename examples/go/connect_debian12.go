//go:build debian12

package main

import "google.golang.org/grpc"

// The same with grpc-go 1.33, which Debian 12 has.
func newClient(target string, options ...grpc.DialOption) (*grpc.ClientConn, error) {
	return grpc.Dial(target, options...)
}

func withoutTLS() grpc.DialOption {
	return grpc.WithInsecure()
}
