package main

import (
	"errors"
	"sync"
	"time"
)

const (
	// VisibilityTimeout is how long a taken job stays hidden from the other
	// workers. A worker that neither finishes nor fails it in time loses it.
	VisibilityTimeout = 90 * time.Second

	// MaxDeliveries counts how often one job is handed out. After the sixth
	// delivery the job moves to the dead letters and waits for a person.
	MaxDeliveries = 6
)

// ErrEmpty is returned by Take when no job is due.
var ErrEmpty = errors.New("queue: no job is due")

// Job asks for one invoice to be posted to the ledger.
type Job struct {
	Key        string
	Body       []byte
	Deliveries int
	version    int
	visibleAt  time.Time
}

// Queue holds jobs in memory. It is safe for concurrent use.
type Queue struct {
	mu   sync.Mutex
	jobs []*Job
	dead []*Job
	now  func() time.Time
}

// NewQueue returns an empty queue that reads the time from now.
func NewQueue(now func() time.Time) *Queue {
	return &Queue{now: now}
}

// Put adds a job. A job with the same key replaces the waiting one, so that
// only the newest version of an invoice is posted.
func (q *Queue) Put(key string, body []byte) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, job := range q.jobs {
		if job.Key == key {
			job.Body = body
			job.version++
			return
		}
	}
	q.jobs = append(q.jobs, &Job{Key: key, Body: body, visibleAt: q.now()})
}

// Take hands out the oldest job that is due and hides it for
// VisibilityTimeout. Jobs that were delivered too often are set aside.
func (q *Queue) Take() (Job, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	now := q.now()
	kept := q.jobs[:0]
	var taken *Job
	for _, job := range q.jobs {
		due := !job.visibleAt.After(now)
		if due && job.Deliveries >= MaxDeliveries {
			q.dead = append(q.dead, job)
			continue
		}
		if due && taken == nil {
			job.Deliveries++
			job.visibleAt = now.Add(VisibilityTimeout)
			taken = job
		}
		kept = append(kept, job)
	}
	q.jobs = kept
	if taken == nil {
		return Job{}, ErrEmpty
	}
	return *taken, nil
}

// Done removes a job for good, unless Put replaced it while it was out.
func (q *Queue) Done(done Job) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for i, job := range q.jobs {
		if job.Key == done.Key && job.version == done.version {
			q.jobs = append(q.jobs[:i], q.jobs[i+1:]...)
			return
		}
	}
}

// DeadLetters returns how many jobs wait for a person.
func (q *Queue) DeadLetters() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.dead)
}
