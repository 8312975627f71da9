// Command worker takes posting jobs from the queue and sends them to the
// ledger. It runs four posters and stops within 25 seconds of a SIGTERM.
package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log"
	"net/http"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"
)

const (
	posters       = 4
	idlePause     = 300 * time.Millisecond
	ledgerTimeout = 12 * time.Second
	drainTimeout  = 25 * time.Second
	healthAddr    = ":9464"
)

// post sends one job. The ledger answers 409 when it already holds the
// posting, which counts as success.
func post(ctx context.Context, client *http.Client, url string, job Job) error {
	ctx, cancel := context.WithTimeout(ctx, ledgerTimeout)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/postings", bytes.NewReader(job.Body))
	if err != nil {
		return err
	}
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("Idempotency-Key", job.Key)
	answer, err := client.Do(request)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	if answer.StatusCode < 300 || answer.StatusCode == http.StatusConflict {
		return nil
	}
	return fmt.Errorf("ledger answered %d", answer.StatusCode)
}

// run works until stop is closed. A job that fails is left in the queue and
// comes back when its visibility timeout has passed.
func run(stop <-chan struct{}, queue *Queue, url string, dryRun bool) {
	client := &http.Client{}
	for {
		select {
		case <-stop:
			return
		default:
		}
		job, err := queue.Take()
		if errors.Is(err, ErrEmpty) {
			time.Sleep(idlePause)
			continue
		}
		if dryRun {
			log.Printf("dry run: %s", job.Key)
			queue.Done(job)
			continue
		}
		if err := post(context.Background(), client, url, job); err != nil {
			log.Printf("%s, delivery %d: %v", job.Key, job.Deliveries, err)
			continue
		}
		queue.Done(job)
	}
}

func main() {
	url := os.Getenv("LEDGER_URL")
	if url == "" {
		log.Fatal("LEDGER_URL is not set")
	}
	dryRun := os.Getenv("TALLY_DRY_RUN") == "1"
	queue := NewQueue(time.Now)

	http.HandleFunc("/healthz", func(w http.ResponseWriter, _ *http.Request) {
		// More than 20 dead letters turn the health check red.
		if queue.DeadLetters() > 20 {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	})
	go func() { log.Print(http.ListenAndServe(healthAddr, nil)) }()

	stop := make(chan struct{})
	var group sync.WaitGroup
	for i := 0; i < posters; i++ {
		group.Add(1)
		go func() {
			defer group.Done()
			run(stop, queue, url, dryRun)
		}()
	}

	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGTERM, os.Interrupt)
	<-signals
	close(stop)
	finished := make(chan struct{})
	go func() { group.Wait(); close(finished) }()
	select {
	case <-finished:
	case <-time.After(drainTimeout):
		log.Print("gave up waiting for the posters")
	}
}
