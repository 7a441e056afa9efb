//! Actions and reports that wait for the driver to poll them.

use std::collections::VecDeque;

use super::action::{Action, PeerRef};
use super::config::WorkerMachineConfig;
use super::trace::TraceEvent;
use crate::stats::Stats;
use crate::wire::{PeerMessage, WorkerReport};

/// Actions in the order in which they came up, and the report that has gathered.
#[derive(Debug)]
pub(super) struct MachineOutput {
    actions: VecDeque<Action>,
    pub(super) report: WorkerReport,
    events: VecDeque<TraceEvent>,
    /// True if anything is counted at all.
    counts: bool,
    /// True if anything was counted since the last report.
    counted: bool,
    traces: bool,
}

impl MachineOutput {
    pub(super) fn new(config: &WorkerMachineConfig) -> Self {
        MachineOutput {
            actions: VecDeque::new(),
            report: WorkerReport::new(config.rank),
            events: VecDeque::new(),
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

    /// Records an event, if events are traced.
    pub(super) fn trace(&mut self, event: impl FnOnce() -> TraceEvent) {
        if self.traces {
            self.events.push_back(event());
        }
    }

    pub(super) fn pop_trace(&mut self) -> Option<TraceEvent> {
        self.events.pop_front()
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
