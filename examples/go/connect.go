//go:build !debian12

package main

import (
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

func newClient(target string, options ...grpc.DialOption) (*grpc.ClientConn, error) {
	return grpc.NewClient(target, options...)
}

func withoutTLS() grpc.DialOption {
	return grpc.WithTransportCredentials(insecure.NewCredentials())
}
