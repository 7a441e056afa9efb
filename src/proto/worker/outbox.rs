//! What the machine wants done and has to tell, until the driver asks.

use std::collections::VecDeque;

use super::action::{Action, PeerRef};
use crate::proto::ids::RankId;
use crate::proto::stats::Stats;
use crate::proto::wire::{PeerMessage, WorkerReport};

/// Actions in the order in which they were wanted, and the report that has gathered.
#[derive(Debug)]
pub(super) struct Outbox {
    actions: VecDeque<Action>,
    pub(super) report: WorkerReport,
}

fn empty(rank: RankId) -> WorkerReport {
    WorkerReport {
        rank,
        finished_sending: Vec::new(),
        finished_recving: Vec::new(),
        failed_recving: Vec::new(),
        records: Vec::new(),
        stats: Stats::default(),
    }
}

impl Outbox {
    pub(super) fn new(rank: RankId) -> Self {
        Outbox { actions: VecDeque::new(), report: empty(rank) }
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
        let fresh = empty(self.report.rank);
        if self.report == fresh {
            return None;
        }
        Some(std::mem::replace(&mut self.report, fresh))
    }
}
