// Runs cases with grpc-go; see tests/interop/cases.py.
package main

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/golang/protobuf/proto"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	_ "google.golang.org/grpc/encoding/gzip"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

const smallBytes = 16384
const noLimit = 1 << 30

type call struct {
	Path          string            `json:"path"`
	Kind          string            `json:"kind"`
	Requests      []json.RawMessage `json:"requests"`
	Metadata      [][2]string       `json:"metadata"`
	TimeoutMs     int               `json:"timeout_ms"`
	StartMs       int               `json:"start_ms"`
	CancelAfterMs int               `json:"cancel_after_ms"`
	CancelAfter   int               `json:"cancel_after"`
	SendPauseMs   int               `json:"send_pause_ms"`
	ReadPauseMs   int               `json:"read_pause_ms"`
	Repeat        int               `json:"repeat"`
	ForMs         int               `json:"for_ms"`
}

type testCase struct {
	Target      string            `json:"target"`
	TLS         map[string]string `json:"tls"`
	Connections int               `json:"connections"`
	KeepaliveMs int               `json:"keepalive_ms"`
	Gzip        bool              `json:"gzip"`
	Calls       []call            `json:"calls"`
}

// A call, as it ended.
type one struct {
	status    int
	message   string
	trailing  [][2]string
	responses [][3]interface{}
	seconds   float64
}

type outcome struct {
	Statuses  map[string]int   `json:"statuses"`
	Message   string           `json:"message"`
	Trailing  [][2]string      `json:"trailing"`
	Responses [][3]interface{} `json:"responses"`
	Distinct  int              `json:"distinct"`
	Seconds   float64          `json:"seconds"`
}

// Messages are bytes.
type raw struct{}

func (raw) Marshal(value interface{}) ([]byte, error) { return *value.(*[]byte), nil }
func (raw) Name() string                              { return "proto" }
func (raw) Unmarshal(data []byte, value interface{}) error {
	*value.(*[]byte) = append([]byte{}, data...)
	return nil
}

func must(err error) {
	if err != nil {
		panic(err)
	}
}

func requestsOf(of call) [][]byte {
	var requests [][]byte
	for _, encoded := range of.Requests {
		var size int
		if json.Unmarshal(encoded, &size) == nil {
			request := make([]byte, size)
			for place := range request {
				request[place] = byte(place % 251)
			}
			requests = append(requests, request)
			continue
		}
		var data []byte
		must(json.Unmarshal(encoded, &data))
		requests = append(requests, data)
	}
	return requests
}

func dial(of testCase) *grpc.ClientConn {
	options := []grpc.DialOption{
		grpc.WithDisableRetry(),
		grpc.WithMaxHeaderListSize(1 << 20),
		grpc.WithDefaultCallOptions(
			grpc.ForceCodec(raw{}), grpc.MaxCallRecvMsgSize(noLimit), grpc.MaxCallSendMsgSize(noLimit)),
	}
	if of.Gzip {
		options = append(options, grpc.WithDefaultCallOptions(grpc.UseCompressor("gzip")))
	}
	if of.KeepaliveMs > 0 {
		options = append(options, grpc.WithKeepaliveParams(
			keepalive.ClientParameters{Time: time.Duration(of.KeepaliveMs) * time.Millisecond}))
	}
	if of.TLS == nil {
		options = append(options, grpc.WithInsecure())
	} else {
		authorities := x509.NewCertPool()
		read, err := os.ReadFile(of.TLS["ca"])
		must(err)
		authorities.AppendCertsFromPEM(read)
		config := &tls.Config{RootCAs: authorities}
		if of.TLS["key"] != "" {
			shown, err := tls.LoadX509KeyPair(of.TLS["certificate"], of.TLS["key"])
			must(err)
			config.Certificates = []tls.Certificate{shown}
		}
		options = append(options, grpc.WithTransportCredentials(credentials.NewTLS(config)))
	}
	connection, err := grpc.Dial(of.Target, options...)
	must(err)
	return connection
}

func (ended *one) received(data []byte) {
	small := ""
	if len(data) <= smallBytes {
		small = base64.StdEncoding.EncodeToString(data)
	}
	ended.responses = append(ended.responses, [3]interface{}{len(data), crc32.ChecksumIEEE(data), small})
}

func callOnce(connection *grpc.ClientConn, of call) one {
	began := time.Now()
	ended := one{responses: [][3]interface{}{}, trailing: [][2]string{}}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	if of.TimeoutMs > 0 {
		ctx, cancel = context.WithTimeout(ctx, time.Duration(of.TimeoutMs)*time.Millisecond)
		defer cancel()
	}
	if of.CancelAfterMs > 0 {
		time.AfterFunc(time.Duration(of.CancelAfterMs)*time.Millisecond, cancel)
	}
	for _, pair := range of.Metadata {
		value := pair[1]
		if strings.HasSuffix(pair[0], "-bin") {
			data, err := base64.StdEncoding.DecodeString(value)
			must(err)
			value = string(data)
		}
		ctx = metadata.AppendToOutgoingContext(ctx, pair[0], value)
	}
	var trailer metadata.MD
	var err error
	if of.Kind == "unary" {
		var response []byte
		err = connection.Invoke(ctx, of.Path, &requestsOf(of)[0], &response, grpc.Trailer(&trailer))
		if err == nil {
			ended.received(response)
		}
	} else {
		trailer, err = stream(ctx, cancel, connection, of, &ended)
	}
	ended.seconds = time.Since(began).Seconds()
	came, _ := status.FromError(err)
	ended.status, ended.message = int(came.Code()), came.Message()
	for key, values := range trailer {
		for _, value := range values {
			if strings.HasSuffix(key, "-bin") {
				value = base64.StdEncoding.EncodeToString([]byte(value))
			}
			ended.trailing = append(ended.trailing, [2]string{key, value})
		}
	}
	if err != nil && len(came.Proto().Details) > 0 { // grpc-go has them in the status alone
		data, err := proto.Marshal(came.Proto())
		must(err)
		ended.trailing = append(
			ended.trailing, [2]string{"grpc-status-details-bin", base64.StdEncoding.EncodeToString(data)})
	}
	return ended
}

func stream(
	ctx context.Context, cancel func(), connection *grpc.ClientConn, of call, ended *one,
) (metadata.MD, error) {
	client, server := of.Kind != "server", of.Kind != "client"
	running, err := connection.NewStream(
		ctx, &grpc.StreamDesc{ClientStreams: client, ServerStreams: server}, of.Path)
	if err != nil {
		return nil, err
	}
	go func() {
		requests := requestsOf(of)
		for number := range requests {
			if number > 0 {
				time.Sleep(time.Duration(of.SendPauseMs) * time.Millisecond)
			}
			if running.SendMsg(&requests[number]) != nil {
				return
			}
		}
		running.CloseSend()
	}()
	for {
		var response []byte
		err := running.RecvMsg(&response)
		if err == io.EOF {
			return running.Trailer(), nil
		}
		if err != nil {
			return running.Trailer(), err
		}
		ended.received(response)
		time.Sleep(time.Duration(of.ReadPauseMs) * time.Millisecond)
		if len(ended.responses) == of.CancelAfter {
			cancel()
		}
		if !server {
			return running.Trailer(), nil
		}
	}
}

func caller(connection *grpc.ClientConn, of call) []one {
	time.Sleep(time.Duration(of.StartMs) * time.Millisecond)
	ends := time.Now().Add(time.Duration(of.ForMs) * time.Millisecond)
	ended := []one{callOnce(connection, of)}
	for time.Now().Before(ends) {
		ended = append(ended, callOnce(connection, of))
	}
	return ended
}

func outcomeOf(calls []one) outcome {
	worst, statuses, distinct, seconds := calls[0], map[string]int{}, map[string]bool{}, 0.0
	for _, ended := range calls {
		if worst.status == 0 {
			worst = ended
		}
		statuses[fmt.Sprint(ended.status)]++
		sums := ""
		for _, response := range ended.responses {
			sums += fmt.Sprint(response[0], response[1], ";")
		}
		distinct[sums] = true
		if ended.seconds > seconds {
			seconds = ended.seconds
		}
	}
	return outcome{statuses, worst.message, worst.trailing, calls[0].responses, len(distinct), seconds}
}

func run(of testCase) []outcome {
	var connections []*grpc.ClientConn
	for number := 0; number < of.Connections; number++ {
		connections = append(connections, dial(of))
	}
	outcomes := make([]outcome, len(of.Calls))
	var calls sync.WaitGroup
	for place := range of.Calls {
		calls.Add(1)
		go func(place int) {
			defer calls.Done()
			ended := make([][]one, of.Calls[place].Repeat)
			var callers sync.WaitGroup
			for number := range ended {
				callers.Add(1)
				go func(number int) {
					defer callers.Done()
					ended[number] = caller(connections[number%len(connections)], of.Calls[place])
				}(number)
			}
			callers.Wait()
			var all []one
			for _, several := range ended {
				all = append(all, several...)
			}
			outcomes[place] = outcomeOf(all)
		}(place)
	}
	calls.Wait()
	for _, connection := range connections {
		connection.Close()
	}
	return outcomes
}

func main() {
	lines := bufio.NewReader(os.Stdin)
	for {
		line, err := lines.ReadBytes('\n')
		if err != nil {
			return
		}
		var of testCase
		must(json.Unmarshal(line, &of))
		written, err := json.Marshal(map[string]interface{}{"outcomes": run(of)})
		must(err)
		fmt.Println(string(written))
	}
}
