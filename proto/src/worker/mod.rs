//! The worker side's state machine: one per rank, producer and consumer at once, without I/O and without a clock.
//!
//! The driver passes in events (`handle_*`), each with the current time, which never goes back. After each `handle_*`
//! it polls, in this order:
//!
//! 1. [`WorkerMachine::poll_action`] until it returns `None`: the actions, in the order in which to take them;
//! 2. [`WorkerMachine::poll_report`]: the report for the scheduler side, gathered since the last call;
//! 3. [`WorkerMachine::poll_timeout`]: when to call [`WorkerMachine::handle_timeout`] at the latest.
//!
//! A report may be polled later than the actions, never before them: the blocks of a reported request may be reused at
//! once.
//!
//! **Producer.** A grant makes a lease. Heartbeats of its readers renew it. Each reader's `Done` is answered by a verdict,
//! `Valid` only while the lease holds. Once all announced readers no longer need it, or once it expires, the
//! request is reported in `finished_sending`, once per grant. A `Done` or `Release` that comes before the grant waits for it.
//! A grant that consumers may await is reported in `granted`.
//!
//! **Consumer.** A hold handshakes, connects and sends heartbeats. A load does the missing ones of these steps, reads,
//! sends `Done`, and is reported in `finished_recving` when every producer rank has answered `Valid`; in any other case
//! it is reported in `failed_recving` too. A report comes exactly once per load, and only when none of its transfers
//! can touch memory any more. A load whose prefill may still be under way holds until that is over, and meanwhile reads
//! the written chunks (`consumer/chunks.rs`). A release tells the producer and is not reported. Requests that name the
//! same lease use it together: the producer is told when the last of them needs it no more.

mod action;
mod config;
mod consumer;
mod load;
mod output;
mod producer;
mod sessions;
mod timers;
mod trace;

use std::sync::Arc;

pub use action::{Action, AwaitId, PeerKey, PeerRef, SessionId, TransferFigures, TransferToken};
pub use config::{WorkerMachineConfig, WorkerSettings};
use serde::Serialize;
pub use trace::{LeaseEnd, ReceiveTrace, ReceivedChunk, TraceEvent};

use crate::error::Result;
use crate::handshake::{HandshakeFailure, PrefillProgress};
use crate::time::Time;
use crate::wire::{Cause, EngineShape, HandshakeReply, PeerMessage, RankMetadata, StepMetadata, WorkerReport};
use consumer::{Consumer, HoldsAtEnd};
use output::MachineOutput;
use producer::{LeaseRenewal, Producer, ReaderMessage};

/// One rank's state machine. Not thread-safe by itself: its driver's thread owns it.
#[derive(Debug)]
pub struct WorkerMachine {
    config: WorkerMachineConfig,
    now: Time,
    producer: Producer,
    consumer: Consumer,
    out: MachineOutput,
}

/// How much the machine remembers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct MachineGauges {
    /// Producer: leases that hold.
    pub leases: usize,
    /// Producer: messages about requests that are not granted yet.
    pub early: usize,
    /// Producer: ended requests that are remembered.
    pub tombstones: usize,
    /// Consumer: requests whose lease is kept alive without a load.
    pub holds: usize,
    /// Consumer: loads without a terminal report.
    pub loads: usize,
    /// Consumer: releases that wait for a connection.
    pub releases: usize,
    /// Consumer: transfers that may touch memory.
    #[serde(skip)]
    pub transfers: usize,
    /// Consumer: handshakes under way or done.
    pub sessions: usize,
    /// Consumer: producer ranks connected or connecting.
    pub peers: usize,
}

impl WorkerMachine {
    /// A machine without work. Errors: what [`WorkerMachineConfig::check`] says.
    pub fn new(config: WorkerMachineConfig) -> Result<WorkerMachine> {
        config.check()?;
        Ok(WorkerMachine {
            now: Time::default(),
            producer: Producer::new(&config),
            consumer: Consumer::new(&config),
            out: MachineOutput::new(&config),
            config,
        })
    }

    /// The configuration.
    pub fn config(&self) -> &WorkerMachineConfig {
        &self.config
    }

    /// Producer: leases that hold.
    pub fn leases(&self) -> usize {
        self.producer.leases()
    }

    /// How much the machine remembers. Counts, so not for a hot path.
    pub fn gauges(&self) -> MachineGauges {
        let (holds, loads, releases) = self.consumer.counts();
        MachineGauges {
            leases: self.producer.leases(),
            early: self.producer.early(),
            tombstones: self.producer.tombstones(),
            holds,
            loads,
            releases,
            transfers: self.consumer.in_flight(),
            sessions: self.consumer.sessions().len(),
            peers: self.consumer.sessions().peer_count(),
        }
    }

    /// True if no transfer is under way. After `handle_shutdown`: every load has been reported and the memory may
    /// be given up.
    pub fn is_drained(&self) -> bool {
        self.consumer.in_flight() == 0
    }

    /// States this rank's own metadata, with the geometry. Before that, holds and releases are ignored and loads fail.
    pub fn set_local(&mut self, local: Arc<RankMetadata>) {
        self.consumer.set_local(local);
    }

    /// A step's work. Everything of a step may name what the same step starts: a load and its abort, a hold and its
    /// release.
    pub fn handle_step(&mut self, now: Time, step: StepMetadata) {
        let now = self.advance(now);
        self.consumer.set_engine(step.engine);
        let out = &mut self.out;
        for grant in step.grants {
            self.producer.grant(now, grant, out);
        }
        for request in step.dropped {
            self.producer.dropped(now, request, out);
        }
        for hold in step.holds {
            self.consumer.hold(now, hold, out);
        }
        for load in step.loads {
            self.consumer.load(now, load, out);
        }
        for release in step.releases {
            self.consumer.release(now, release, out);
        }
        for request in step.aborts {
            self.consumer.abort(now, &request, out);
        }
    }

    /// The answer to [`Action::Handshake`], or why there is none. Gives what came of it, for the log: the notes of
    /// [`HandshakeOutcome`](crate::handshake::HandshakeOutcome); nothing when the session does not wait for an
    /// answer (any more).
    pub fn handle_handshake(
        &mut self,
        now: Time,
        session: SessionId,
        answer: Result<HandshakeReply, HandshakeFailure>,
    ) -> Option<Result<Vec<String>, HandshakeFailure>> {
        let now = self.advance(now);
        self.consumer.handshake(now, session, answer, &mut self.out)
    }

    /// The shape of the engine behind this connection. None if the connection is not ours (any more).
    pub fn shape_of(&self, peer: &PeerKey) -> Option<EngineShape> {
        self.consumer.shape_of(peer)
    }

    /// The answer to [`Action::Await`]: how far the prefill is, or why there is none. Ignored when nobody waits for it any
    /// more.
    pub fn handle_prefill(&mut self, now: Time, number: AwaitId, result: Result<PrefillProgress, (Cause, String)>) {
        let now = self.advance(now);
        self.consumer.handle_progress(now, number, result, &mut self.out);
    }

    /// [`Action::Connect`] succeeded: transfers and messages can be given for the peer.
    pub fn handle_connected(&mut self, now: Time, peer: &PeerKey) {
        let now = self.advance(now);
        self.consumer.connected(now, peer, &mut self.out);
    }

    /// A connection could not be made, or is broken; `message` says why, for people. The peer's transfers are still
    /// answered one by one.
    pub fn handle_peer_lost(&mut self, now: Time, peer: &PeerRef, message: &str) {
        let now = self.advance(now);
        if let PeerRef::Outbound(key) = peer {
            self.consumer.peer_lost(now, key, message, &mut self.out);
        }
        // A consumer that is gone says nothing more: its leases run out on their own.
    }

    /// The answer to [`Action::Transfer`]: no operation of it can touch memory any more.
    pub fn handle_transfer_done(
        &mut self,
        now: Time,
        token: TransferToken,
        result: Result<TransferFigures, (Cause, String)>,
    ) {
        let now = self.advance(now);
        self.consumer.transfer_done(now, token, result, &mut self.out);
    }

    /// A message from another rank.
    pub fn handle_message(&mut self, now: Time, from: &PeerRef, message: PeerMessage) {
        let now = self.advance(now);
        let out = &mut self.out;
        match message {
            PeerMessage::Heartbeat { requests, leases, reader } => {
                self.producer.heartbeat(now, LeaseRenewal { requests, leases, reader }, out);
            }
            PeerMessage::Done { request, lease_id, reader, readers, serial, more } => {
                self.producer.done(now, from, request, ReaderMessage { reader, readers, lease_id, more }, serial, out);
            }
            PeerMessage::Release { request, lease_id, reader, readers } => {
                self.producer.release(now, request, ReaderMessage { reader, readers, lease_id, more: false }, out);
            }
            PeerMessage::Verdict { request, verdict, serial } => {
                if let PeerRef::Outbound(key) = from {
                    self.consumer.verdict(now, key, &request, verdict, serial, out);
                }
            }
        }
    }

    /// The time of [`WorkerMachine::poll_timeout`] has come. Harmless at any other time.
    pub fn handle_timeout(&mut self, now: Time) {
        self.advance(now);
    }

    /// Ends every load (reported as shut down, once its transfers are over), hold and lease. What steps bring after that
    /// ends at once. Done when [`WorkerMachine::is_drained`] and the last actions and report have been polled.
    pub fn handle_shutdown(&mut self, now: Time) {
        self.end(now, HoldsAtEnd::Released);
    }

    /// As [`WorkerMachine::handle_shutdown`], for an engine that starts a new worker later. Prefills that wait to be
    /// loaded stay with their producers, as long as the leases last.
    pub fn handle_suspend(&mut self, now: Time) {
        self.end(now, HoldsAtEnd::Kept);
    }

    fn end(&mut self, now: Time, holds: HoldsAtEnd) {
        let now = self.advance(now);
        self.consumer.shut_down(now, holds, &mut self.out);
        self.producer.shut_down(now, &mut self.out);
    }

    /// The next thing to do.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.out.pop()
    }

    /// Returns the events since the last report; `None` without any.
    pub fn poll_report(&mut self) -> Option<WorkerReport> {
        self.out.take_report()
    }

    /// The next event in the life of a request, with [`WorkerMachineConfig::trace`]. To be polled after every
    /// `handle_*`.
    pub fn poll_trace(&mut self) -> Option<TraceEvent> {
        self.out.pop_trace()
    }

    /// When to call [`WorkerMachine::handle_timeout`] next. It lies after the time of the last `handle_*`.
    pub fn poll_timeout(&mut self) -> Option<Time> {
        [self.producer.next_timeout(), self.consumer.next_timeout()].into_iter().flatten().min()
    }

    /// Lets everything happen that was due by `now`, so that what is handled next finds the state of that time.
    fn advance(&mut self, now: Time) -> Time {
        self.now = self.now.max(now);
        self.producer.advance(self.now, &mut self.out);
        self.consumer.advance(self.now, &mut self.out);
        self.now
    }
}
