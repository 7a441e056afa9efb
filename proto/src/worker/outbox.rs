//! What the machine wants done and has to tell, until the driver asks.

use std::collections::VecDeque;

use super::action::{Action, PeerRef};
use super::config::WorkerConfig;
use super::life::Life;
use crate::stats::Stats;
use crate::wire::{PeerMessage, WorkerReport};

/// Actions in the order in which they were wanted, and the report that has gathered.
#[derive(Debug)]
pub(super) struct Outbox {
    actions: VecDeque<Action>,
    pub(super) report: WorkerReport,
    lives: VecDeque<Life>,
    /// Whether anything is counted at all.
    counts: bool,
    /// Whether anything was, since the last report.
    counted: bool,
    traces: bool,
}

impl Outbox {
    pub(super) fn new(config: &WorkerConfig) -> Self {
        Outbox {
            actions: VecDeque::new(),
            report: WorkerReport::new(config.rank),
            lives: VecDeque::new(),
            counts: config.telemetry,
            counted: false,
            traces: config.trace,
        }
    }

    /// Counts, unless nothing is to be counted.
    pub(super) fn count(&mut self, count: impl FnOnce(&mut Stats)) {
        if self.counts {
            self.counted = true;
            count(&mut self.report.stats);
        }
    }

    /// Tells of a request's life, if that is wanted.
    pub(super) fn trace(&mut self, life: impl FnOnce() -> Life) {
        if self.traces {
            self.lives.push_back(life());
        }
    }

    pub(super) fn pop_life(&mut self) -> Option<Life> {
        self.lives.pop_front()
    }

    pub(super) fn push(&mut self, action: Action) {
        self.actions.push_back(action);
    }

    pub(super) fn send(&mut self, peer: PeerRef, message: PeerMessage) {
        self.push(Action::Send { peer, message });
    }

    pub(super) fn pop(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    pub(super) fn take_report(&mut self) -> Option<WorkerReport> {
        // Not by comparing it with an empty one: it has kilobytes of histograms, and this is asked every turn. Failures and
        // records come with the end of a receive.
        let report = &self.report;
        let silent =
            report.finished_sending.is_empty() && report.finished_recving.is_empty() && report.granted.is_empty();
        if silent && !self.counted {
            return None;
        }
        self.counted = false;
        let fresh = WorkerReport::new(self.report.rank);
        Some(std::mem::replace(&mut self.report, fresh))
    }
}
