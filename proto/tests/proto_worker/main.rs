//! One worker's state machine against hand-made events: what a pair of well-behaved machines never sends each other.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod consuming;
mod producing;
#[path = "../proto_pair/rank.rs"]
#[allow(dead_code)]
mod rank;

use std::sync::Arc;

use kvferry_proto::handshake::{HandshakeFailure, PrefillProgress};
use kvferry_proto::ids::{Incarnation, RankId};
use kvferry_proto::stats::Stats;
use kvferry_proto::time::Time;
use kvferry_proto::wire::{
    Blocks, Cause, EngineShape, Grant, Hold, Load, PeerMessage, Prefill, RankMetadata, Reader, Release, Remote,
    StepMetadata, Verdict, WorkerReport,
};
use kvferry_proto::worker::{
    Action, PeerKey, PeerRef, SessionId, TraceEvent, TransferFigures, TransferToken, WorkerMachine,
    WorkerMachineConfig, WorkerSettings,
};
use rank::*;

const MS: u64 = 1_000;

fn config() -> WorkerMachineConfig {
    WorkerMachineConfig::new(engine("me"), RANK, SHAPE, Incarnation(77), settings())
}

fn with(settings: WorkerSettings) -> WorkerMachineConfig {
    WorkerMachineConfig { settings, ..config() }
}

fn worker(config: WorkerMachineConfig) -> WorkerMachine {
    let mut w = WorkerMachine::new(config).unwrap();
    w.set_local(Arc::new(metadata(engine("me"), 77, 8)));
    w
}

fn actions(w: &mut WorkerMachine) -> Vec<Action> {
    std::iter::from_fn(|| w.poll_action()).collect()
}

fn verdicts(w: &mut WorkerMachine) -> Vec<(u64, Verdict)> {
    actions(w)
        .into_iter()
        .map(|action| match action {
            Action::Send { message: PeerMessage::Verdict { verdict, serial, .. }, .. } => (serial, verdict),
            other => panic!("expected verdicts, got {other:?}"),
        })
        .collect()
}

fn sent(w: &mut WorkerMachine) -> Vec<Grant> {
    w.poll_report().map(|r| r.finished_sending).unwrap_or_default().into_iter().map(|r| grant(r.as_str(), 0)).collect()
}

fn grant(name: &str, lease_id: u64) -> Grant {
    Grant { request: request(name), lease_ms: 1_000, lease_id, name: None, history: false }
}

fn grants(w: &mut WorkerMachine, now: u64, grant: Grant) {
    w.handle_step(Time(now), StepMetadata { grants: vec![grant], ..Default::default() });
}

fn reader(n: u64) -> Reader {
    Reader { engine: engine("reader"), incarnation: Incarnation(n), rank: RankId { pp: 0, tp: n as u32 } }
}

fn done(name: &str, n: u64, readers: u32, serial: u64) -> PeerMessage {
    PeerMessage::Done { request: request(name), lease_id: 0, reader: reader(n), readers, serial, more: false }
}

fn from() -> PeerRef {
    PeerRef::Inbound(1)
}

#[test]
fn what_is_fixed_is_as_the_page_says() {
    let page = include_str!("../../../docs/protocol-leases.md");
    let defaults = serde_json::to_value(config()).unwrap();
    let mut compared = 0;
    for row in page.lines().filter_map(|line| line.strip_prefix("| `")) {
        let cells: Vec<&str> = row.split(" | ").collect();
        let (Some(names), Some(values)) = (cells.first(), cells.get(1)) else { continue };
        let names = names.split('`').filter(|name| name.ends_with('s') || name.ends_with("divisor"));
        for (name, value) in names.zip(values.split(", ")) {
            if let (Some(default), Ok(value)) = (defaults.get(name), value.parse::<u64>()) {
                assert_eq!(default.as_u64(), Some(value), "{name}");
                compared += 1;
            }
        }
    }
    let numbers = defaults.as_object().unwrap().iter().filter(|(name, value)| *name != "incarnation" && value.is_u64());
    assert_eq!(compared, numbers.count(), "the page has a row for every one");
}

#[test]
fn bad_values_are_named() {
    type Change = fn(&mut WorkerMachineConfig);
    let cases: [(&str, Change); 3] =
        [("shared_grace_ms", |c| c.shared_grace_ms = 0), ("shape", |c| c.shape.tp = 0), ("rank", |c| c.rank.pp = 7)];
    for (key, change) in cases {
        let mut c = config();
        change(&mut c);
        let e = WorkerMachine::new(c).unwrap_err();
        assert!(e.message().starts_with(key), "{e}");
    }
}
