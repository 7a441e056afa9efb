//! One worker's state machine against hand-made events: what a pair of well-behaved machines never sends each other.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

#[path = "proto_pair/rank.rs"]
#[allow(dead_code)]
mod rank;

use std::sync::Arc;

use kvferry::proto::handshake::HandshakeFailure;
use kvferry::proto::ids::{Incarnation, RankId};
use kvferry::proto::time::Time;
use kvferry::proto::wire::{
    Blocks, Cause, EngineShape, Grant, Hold, Load, PeerMessage, RankMetadata, Reader, Release, Remote, StepMetadata,
    Verdict, WorkerReport,
};
use kvferry::proto::worker::{
    Action, Life, PeerKey, PeerRef, SessionId, TransferFigures, TransferToken, Worker, WorkerConfig,
};
use rank::*;

const MS: u64 = 1_000;

fn config() -> WorkerConfig {
    WorkerConfig::new(engine("me"), RANK, SHAPE, Incarnation(77))
}

fn worker(config: WorkerConfig) -> Worker {
    let mut w = Worker::new(config).unwrap();
    w.set_local(Arc::new(metadata(engine("me"), 77, 8)));
    w
}

fn actions(w: &mut Worker) -> Vec<Action> {
    std::iter::from_fn(|| w.poll_action()).collect()
}

fn verdicts(w: &mut Worker) -> Vec<(u64, Verdict)> {
    actions(w)
        .into_iter()
        .map(|action| match action {
            Action::Send { message: PeerMessage::Verdict { verdict, serial, .. }, .. } => (serial, verdict),
            other => panic!("expected verdicts, got {other:?}"),
        })
        .collect()
}

fn sent(w: &mut Worker) -> Vec<Grant> {
    w.poll_report().map(|r| r.finished_sending).unwrap_or_default().into_iter().map(|r| grant(r.as_str(), 0)).collect()
}

fn grant(name: &str, lease_id: u64) -> Grant {
    Grant { request: request(name), lease_ms: 1_000, lease_id, name: None }
}

fn grants(w: &mut Worker, now: u64, grant: Grant) {
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

mod producing {
    use super::*;

    #[test]
    fn a_repeated_done_gets_its_answer_again_and_another_read_does_not() {
        let mut w = worker(config());
        grants(&mut w, 0, grant("r", 1));
        w.handle_message(Time(1), &from(), done("r", 1, 1, 10));
        w.handle_message(Time(2), &from(), done("r", 1, 1, 10));
        w.handle_message(Time(3), &from(), done("r", 1, 1, 11));
        w.handle_message(Time(4), &from(), done("r", 2, 1, 10));
        assert_eq!(
            verdicts(&mut w),
            [(10, Verdict::Valid), (10, Verdict::Valid), (11, Verdict::Expired), (10, Verdict::Expired)],
            "the blocks may be reused once the first read was told"
        );
        assert!(w.has_counts());
        let report = w.poll_report().unwrap();
        assert_eq!((report.finished_sending, report.stats.sends_read), (vec![request("r")], 1));
        assert!(w.poll_report().is_none() && !w.has_counts(), "what was reported is not counted again");
    }

    #[test]
    fn the_trace_says_how_a_lease_ended() {
        let mut w = worker(WorkerConfig { trace: true, ..config() });
        ["read", "released", "dropped", "expired"].into_iter().for_each(|name| grants(&mut w, 0, grant(name, 1)));
        w.handle_message(Time(1), &from(), done("read", 1, 1, 10));
        let release = PeerMessage::Release { request: request("released"), lease_id: 1, reader: reader(1), readers: 1 };
        w.handle_message(Time(2), &from(), release);
        w.handle_step(Time(3), StepMetadata { dropped: vec![request("dropped")], ..Default::default() });
        w.handle_timeout(Time(1_000 * MS));
        let mut ended = 0;
        while let Some(life) = w.poll_life() {
            let Life::SendEnded { request, how, .. } = life else { continue };
            assert_eq!(how.name(), request.as_str());
            ended += 1;
        }
        assert_eq!(ended, 4);
    }

    #[test]
    fn the_lease_ends_with_the_last_reader() {
        let mut w = worker(config());
        grants(&mut w, 0, grant("r", 1));
        w.handle_message(Time(1), &from(), done("r", 1, 3, 10));
        w.handle_message(Time(2), &from(), done("r", 1, 3, 11));
        let release = PeerMessage::Release { request: request("r"), lease_id: 1, reader: reader(2), readers: 3 };
        w.handle_message(Time(3), &from(), release.clone());
        w.handle_message(Time(4), &from(), release);
        assert!(sent(&mut w).is_empty(), "two of three readers were heard");
        w.handle_message(Time(5), &from(), done("r", 3, 3, 12));
        assert_eq!(verdicts(&mut w), [(10, Verdict::Valid), (11, Verdict::Valid), (12, Verdict::Valid)]);
        assert_eq!(sent(&mut w).len(), 1);
    }

    #[test]
    fn expiry_is_told_once_and_judges_what_comes_in_the_same_moment() {
        let mut w = worker(config());
        grants(&mut w, 0, grant("r", 1));
        assert_eq!(w.poll_timeout(), Some(Time(1_000 * MS)));
        w.handle_message(Time(1_000 * MS), &from(), done("r", 1, 1, 10));
        assert_eq!(verdicts(&mut w), [(10, Verdict::Expired)]);
        let report = w.poll_report().unwrap();
        assert_eq!((report.finished_sending, report.stats.sends_expired), (vec![request("r")], 1));
        let beat = PeerMessage::Heartbeat { requests: vec![request("r")], leases: vec![1], reader: Some(reader(1)) };
        w.handle_message(Time(1_001 * MS), &from(), beat);
        assert_eq!(w.gauges().leases, 0, "a heartbeat does not bring a lease back");
        w.handle_timeout(Time(200_000 * MS));
        assert_eq!((w.gauges(), w.poll_report(), w.poll_timeout()), (Default::default(), None, None));
    }

    #[test]
    fn an_early_done_waits_for_its_grant_its_drop_or_its_time() {
        let mut w = worker(config());
        for (n, name) in ["granted", "dropped", "nothing"].into_iter().enumerate() {
            w.handle_message(Time(0), &from(), done(name, 1, 1, n as u64));
        }
        assert!(verdicts(&mut w).is_empty());
        let step =
            StepMetadata { grants: vec![grant("granted", 1)], dropped: vec![request("dropped")], ..Default::default() };
        w.handle_step(Time(5 * MS), step);
        assert_eq!(verdicts(&mut w), [(0, Verdict::Valid), (1, Verdict::Unknown)]);
        assert_eq!(sent(&mut w).len(), 1);
        w.handle_message(Time(6 * MS), &from(), done("dropped", 1, 1, 7));
        assert_eq!(verdicts(&mut w), [(7, Verdict::Unknown)]);
        w.handle_timeout(Time(30_000 * MS));
        assert_eq!(verdicts(&mut w), [(2, Verdict::Unknown)]);
        assert_eq!(w.gauges().early, 0);
    }

    #[test]
    fn a_request_id_used_again_is_another_lease() {
        let mut w = worker(config());
        assert_eq!((w.leases(), w.has_news()), (0, false));
        grants(&mut w, 0, grant("r", 1));
        grants(&mut w, 0, grant("other", 3));
        assert_eq!((w.leases(), w.has_news()), (2, false));
        w.handle_message(
            Time(1),
            &from(),
            PeerMessage::Release { request: request("other"), lease_id: 3, reader: reader(2), readers: 1 },
        );
        assert_eq!((w.leases(), w.has_news()), (1, true));
        assert_eq!(sent(&mut w).len(), 1);
        w.handle_timeout(Time(1_000 * MS));
        assert_eq!(sent(&mut w).len(), 1);
        grants(&mut w, 1_001 * MS, grant("r", 2));
        let read_of = |lease_id| PeerMessage::Done {
            request: request("r"),
            lease_id,
            reader: reader(1),
            readers: 1,
            serial: lease_id,
            more: false,
        };
        w.handle_message(Time(1_002 * MS), &from(), read_of(1));
        assert_eq!(verdicts(&mut w), [(1, Verdict::Expired)], "what was read were the former lease's blocks");
        assert!(sent(&mut w).is_empty());
        w.handle_message(Time(1_003 * MS), &from(), read_of(2));
        assert_eq!((verdicts(&mut w), sent(&mut w).len()), (vec![(2, Verdict::Valid)], 1));
    }

    #[test]
    fn strangers_cannot_make_it_remember_more_than_its_bounds() {
        let mut w = worker(WorkerConfig { early_messages: 10, tombstones: 20, ..config() });
        for i in 0..1_000 {
            w.handle_message(Time(i), &from(), done(&format!("x{i}"), 1, 1, i));
        }
        assert_eq!(w.gauges().early, 10);
        let answers = verdicts(&mut w);
        assert_eq!(answers.len(), 990);
        assert!(answers.iter().all(|(_, verdict)| *verdict == Verdict::Unknown));
        let dropped = (0..1_000).map(|i| request(format!("y{i}"))).collect();
        w.handle_step(Time(2_000), StepMetadata { dropped, ..Default::default() });
        assert_eq!(w.gauges().tombstones, 20);
        grants(&mut w, 3_000, grant("r", 1));
        for n in 0..5_000 {
            w.handle_message(Time(3_000), &from(), done("r", n, u32::MAX, n));
        }
        let ends = sent(&mut w).len();
        assert_eq!(ends, 1, "however many readers were announced");
    }

    /// What a rank of engine "reader" says of lease `lease_id` of request r.
    fn of_lease(lease_id: u64, n: u64, serial: u64, more: bool) -> PeerMessage {
        PeerMessage::Done { request: request("r"), lease_id, reader: reader(n), readers: 2, serial, more }
    }

    fn beat(leases: Vec<u64>, reader: Option<Reader>) -> PeerMessage {
        PeerMessage::Heartbeat { requests: vec![request("r")], leases, reader }
    }

    #[test]
    fn a_reader_that_wants_more_keeps_the_lease_until_it_does_not() {
        let mut w = worker(config());
        grants(&mut w, 0, grant("r", 7));
        w.handle_message(Time(1), &from(), of_lease(7, 1, 10, true));
        w.handle_message(Time(2), &from(), of_lease(7, 2, 11, false));
        assert!(sent(&mut w).is_empty(), "rank 1 still wants it");
        w.handle_message(Time(3), &from(), of_lease(7, 1, 12, false));
        assert_eq!(sent(&mut w).len(), 1);
        // Both of rank 1's reads were found good, and are when it asks again.
        w.handle_message(Time(4), &from(), of_lease(7, 1, 10, true));
        w.handle_message(Time(5), &from(), of_lease(7, 1, 13, false));
        let good = [10, 11, 12, 10].map(|serial| (serial, Verdict::Valid));
        assert_eq!(verdicts(&mut w), [&good[..], &[(13, Verdict::Expired)]].concat());
        assert!(sent(&mut w).is_empty());
    }

    #[test]
    fn a_reader_that_comes_back_while_the_lease_holds_begins_anew() {
        let mut w = worker(config());
        grants(&mut w, 0, grant("r", 7));
        w.handle_message(Time(1), &from(), of_lease(7, 1, 10, false));
        w.handle_message(Time(2), &from(), beat(vec![7], Some(reader(1))));
        // A repeated done is no new word of whether it wants more.
        w.handle_message(Time(3), &from(), of_lease(7, 1, 10, false));
        w.handle_message(Time(4), &from(), of_lease(7, 2, 11, false));
        assert!(sent(&mut w).is_empty(), "rank 1 wants it again");
        let release = PeerMessage::Release { request: request("r"), lease_id: 7, reader: reader(1), readers: 2 };
        w.handle_message(Time(5), &from(), release);
        assert_eq!(sent(&mut w).len(), 1);
    }

    #[test]
    fn a_consumer_rank_that_restarts_takes_its_own_place() {
        let mut w = worker(config());
        grants(&mut w, 0, grant("r", 7));
        w.handle_message(Time(1), &from(), of_lease(7, 1, 10, true));
        let again = Reader { incarnation: Incarnation(99), ..reader(1) };
        let done = |serial| PeerMessage::Done {
            request: request("r"),
            lease_id: 7,
            reader: again.clone(),
            readers: 2,
            serial,
            more: false,
        };
        w.handle_message(Time(2), &from(), done(10));
        assert!(sent(&mut w).is_empty(), "one rank of two");
        w.handle_message(Time(3), &from(), of_lease(7, 2, 10, false));
        assert_eq!((verdicts(&mut w).len(), sent(&mut w).len()), (3, 1));
    }

    #[test]
    fn a_lease_has_one_consumer_engine() {
        let mut w = worker(config());
        grants(&mut w, 0, grant("r", 7));
        w.handle_message(Time(1), &from(), of_lease(7, 1, 10, false));
        let other = Reader { engine: engine("other"), ..reader(2) };
        let done = |lease_id, serial| PeerMessage::Done {
            request: request("r"),
            lease_id,
            reader: other.clone(),
            readers: 2,
            serial,
            more: false,
        };
        w.handle_message(Time(2), &from(), done(7, 11));
        w.handle_message(Time(2), &from(), done(0, 12));
        assert!(sent(&mut w).is_empty(), "another engine's word ends nothing");
        w.handle_message(Time(3), &from(), of_lease(7, 2, 13, false));
        let all = [(10, Verdict::Valid), (11, Verdict::Unknown), (12, Verdict::Unknown), (13, Verdict::Valid)];
        assert_eq!((verdicts(&mut w), sent(&mut w).len()), (all.to_vec(), 1));
    }

    #[test]
    fn heartbeats_count_from_readers_that_name_the_lease() {
        // (what says that it wants the lease, every half second; how long the lease then lasts, in its lengths)
        let stranger = Some(Reader { engine: engine("stranger"), ..reader(9) });
        let cases = [
            ("its reader", vec![7], Some(reader(1)), true, None),
            ("a guess", vec![8], stranger.clone(), false, Some(1_000)),
            ("another engine, which has seen the id", vec![7], stranger.clone(), true, Some(1_000)),
            ("a guess that nobody signs", vec![8], None, false, Some(1_000)),
            ("no id", vec![], None, false, Some(4_000)),
            ("no id, but a name", vec![0], stranger, false, Some(4_000)),
            ("no id, where the consumer is known", vec![], None, true, Some(1_000)),
        ];
        for (who, leases, reader_of, known, end) in cases {
            let mut w = worker(config());
            grants(&mut w, 0, grant("r", 7));
            if known {
                w.handle_message(Time(0), &from(), beat(vec![7], Some(reader(1))));
            }
            let mut ended = None;
            for now in (500..20_000).step_by(500) {
                w.handle_message(Time(now * MS), &from(), beat(leases.clone(), reader_of.clone()));
                if ended.is_none() && !sent(&mut w).is_empty() {
                    ended = Some(now);
                }
            }
            assert_eq!(ended, end, "{who}");
        }
    }

    #[test]
    fn ids_of_leases_have_no_order() {
        let mut w = worker(config());
        for (now, lease_id) in [(0, 900), (2_000, 17), (4_000, 400)] {
            grants(&mut w, now * MS, grant("r", lease_id));
            w.handle_timeout(Time((now + 1_000) * MS));
            assert_eq!(sent(&mut w).len(), 1);
        }
        let serials = [(900, 1), (17, 2), (400, 3), (0, 4)];
        for (lease_id, serial) in serials {
            w.handle_message(Time(5_001 * MS), &from(), of_lease(lease_id, 1, serial, false));
        }
        assert_eq!(verdicts(&mut w), serials.map(|(_, serial)| (serial, Verdict::Expired)), "over, all of them");
        // One that nobody knows is of a grant that is still to come.
        w.handle_message(Time(5_002 * MS), &from(), of_lease(5, 1, 5, false));
        assert_eq!((verdicts(&mut w).len(), w.gauges().early), (0, 1));
        grants(&mut w, 5_003 * MS, grant("r", 5));
        assert_eq!(verdicts(&mut w), [(5, Verdict::Valid)]);
    }

    #[test]
    fn shutdown_ends_leases_and_refuses_what_comes_later() {
        let mut w = worker(config());
        grants(&mut w, 0, grant("a", 1));
        w.handle_message(Time(1), &from(), done("early", 1, 1, 5));
        w.handle_shutdown(Time(2));
        grants(&mut w, 3, grant("b", 2));
        w.handle_message(Time(4), &from(), done("a", 1, 1, 6));
        w.handle_message(Time(5), &from(), done("b", 1, 1, 7));
        assert_eq!(verdicts(&mut w), [(5, Verdict::Unknown), (6, Verdict::Expired), (7, Verdict::Unknown)]);
        assert_eq!(sent(&mut w).len(), 2);
    }
}

mod consuming {
    use super::*;

    fn remote(name: &str) -> Remote {
        Remote {
            engine: engine("p"),
            incarnation: Some(Incarnation(9)),
            request: request(name),
            host: "10.0.0.1".into(),
            port: 5680,
            lease_ms: 1_200,
            lease_id: 1,
            shared: false,
        }
    }

    fn load(name: &str, blocks: [&[u32]; 2]) -> Load {
        Load {
            awaits: false,
            request: request(name),
            remote: remote(&format!("p-{name}")),
            local_blocks: vec![Blocks::from(blocks[0]); 2],
            remote_blocks: vec![Blocks::from(blocks[1]); 2],
            tokens: (0, u64::from(BLOCK_TOKENS) * blocks[0].len() as u64),
            remote_tokens: u64::from(BLOCK_TOKENS) * blocks[1].len() as u64,
            null_block: Some(0),
            window_only: true,
            refused: None,
        }
    }

    fn loads(w: &mut Worker, now: u64, load: Load) {
        w.handle_step(Time(now), StepMetadata { loads: vec![load], ..Default::default() });
    }

    /// The ranks of the engine "p" in the life `incarnation`.
    fn ranks(incarnation: u64) -> Vec<RankMetadata> {
        vec![metadata(engine("p"), 1_000 + incarnation, 8)]
    }

    fn answer(w: &mut Worker, now: u64, session: SessionId, incarnation: u64, ranks: &[RankMetadata]) {
        w.handle_handshake(Time(now), session, Ok(reply(session, incarnation, ranks)));
    }

    fn failure() -> HandshakeFailure {
        HandshakeFailure { cause: Cause::HandshakeFailed, message: "refused".into() }
    }

    fn handshake(w: &mut Worker) -> SessionId {
        let found = actions(w).into_iter().find_map(|action| match action {
            Action::Handshake { session, .. } => Some(session),
            _ => None,
        });
        found.expect("a handshake")
    }

    fn connect(w: &mut Worker) -> PeerKey {
        let found = actions(w).into_iter().find_map(|action| match action {
            Action::Connect { peer, .. } => Some(peer),
            _ => None,
        });
        found.expect("a connect")
    }

    fn transfer(w: &mut Worker) -> TransferToken {
        let found = actions(w).into_iter().find_map(|action| match action {
            Action::Transfer { token, .. } => Some(token),
            _ => None,
        });
        found.expect("a transfer")
    }

    fn done_serial(w: &mut Worker) -> u64 {
        let found = actions(w).into_iter().find_map(|action| match action {
            Action::Send { message: PeerMessage::Done { serial, .. }, .. } => Some(serial),
            _ => None,
        });
        found.expect("a done")
    }

    fn failed(report: Option<WorkerReport>) -> Vec<(String, Cause)> {
        let report = report.unwrap();
        let failed: Vec<_> = report.failed_recving.iter().map(|f| (f.request.to_string(), f.cause)).collect();
        let all: Vec<_> = report.finished_recving.iter().map(|r| r.to_string()).collect();
        assert!(failed.iter().all(|(name, _)| all.contains(name)), "failed ones are finished ones");
        failed
    }

    fn figures() -> TransferFigures {
        TransferFigures { bytes: 8, operations: 1, posted_at: Time(30), all_posted_at: Time(50), finished_at: Time(70) }
    }

    /// A load whose transfer is posted.
    fn reading(w: &mut Worker, name: &str) -> (PeerKey, TransferToken) {
        loads(w, 10, load(name, [&[3], &[4]]));
        let session = handshake(w);
        answer(w, 20, session, 9, &ranks(9));
        let peer = connect(w);
        w.handle_connected(Time(25), &peer);
        (peer, transfer(w))
    }

    #[test]
    fn a_load_goes_through_its_phases_and_has_its_figures() {
        let mut w = worker(config());
        let (peer, token) = reading(&mut w, "a");
        w.handle_transfer_done(Time(80), token, Ok(figures()));
        let serial = done_serial(&mut w);
        assert!(w.poll_report().is_some_and(|r| r.finished_recving.is_empty() && r.stats.handshakes == 1));
        let verdict = PeerMessage::Verdict { request: request("p-a"), verdict: Verdict::Valid, serial };
        w.handle_message(Time(100), &PeerRef::Outbound(peer), verdict);
        let report = w.poll_report().unwrap();
        assert_eq!((report.finished_recving, report.failed_recving), (vec![request("a")], vec![]));
        let r = &report.records[0];
        assert_eq!((r.blocks, r.bytes, r.operations), (2, 8, 1));
        assert_eq!((r.queued_us, r.first_us, r.transfer_us, r.confirm_us, r.cause), (20, 40, 40, 30, None));
        assert_eq!((report.stats.recvs, report.stats.bytes), (1, 8));
        assert_eq!((report.stats.transfer_time.sum(), report.stats.posting_time.sum()), (40, 20));
    }

    #[test]
    fn foreign_and_late_events_are_nobodys() {
        let mut w = worker(config());
        let (peer, token) = reading(&mut w, "a");
        let other = PeerKey { connection: peer.connection + 1_000, ..peer.clone() };
        let wrong_life = PeerKey { incarnation: Incarnation(5), ..peer.clone() };
        w.handle_transfer_done(Time(40), TransferToken(token.0 + 1_000), Ok(figures()));
        w.handle_peer_lost(Time(41), &PeerRef::Outbound(other.clone()), "not ours");
        w.handle_peer_lost(Time(41), &PeerRef::Outbound(wrong_life), "not ours");
        w.handle_connected(Time(42), &other);
        w.handle_handshake(Time(43), SessionId(1_000), Err(failure()));
        w.handle_handshake(Time(44), SessionId(1), Err(failure()));
        assert!(actions(&mut w).is_empty());
        w.handle_transfer_done(Time(80), token, Ok(figures()));
        w.handle_transfer_done(Time(81), token, Err((Cause::PeerDied, "again".into())));
        let serial = done_serial(&mut w);
        let verdict = |serial, name: &str, verdict| PeerMessage::Verdict { request: request(name), verdict, serial };
        let ours = PeerRef::Outbound(peer);
        w.handle_message(Time(82), &PeerRef::Outbound(other), verdict(serial, "p-a", Verdict::Expired));
        w.handle_message(Time(82), &PeerRef::Inbound(1), verdict(serial, "p-a", Verdict::Expired));
        w.handle_message(Time(82), &ours, verdict(serial + 1_000, "p-a", Verdict::Expired));
        w.handle_message(Time(82), &ours, verdict(serial, "p-b", Verdict::Expired));
        assert!(w.poll_report().is_none_or(|r| r.finished_recving.is_empty()));
        w.handle_message(Time(83), &ours, verdict(serial, "p-a", Verdict::Valid));
        w.handle_message(Time(84), &ours, verdict(serial, "p-a", Verdict::Expired));
        let report = w.poll_report().unwrap();
        assert_eq!((report.finished_recving.len(), report.failed_recving.len()), (1, 0));
    }

    #[test]
    fn nothing_is_reported_while_a_transfer_may_write() {
        let mut w = worker(config());
        let (peer, token) = reading(&mut w, "a");
        let _ = w.poll_report();
        w.handle_peer_lost(Time(50), &PeerRef::Outbound(peer), "reset");
        assert_eq!(actions(&mut w), [Action::Cancel { token }]);
        let again =
            StepMetadata { aborts: vec![request("a")], loads: vec![load("a", [&[3], &[4]])], ..Default::default() };
        w.handle_step(Time(51), again);
        w.handle_shutdown(Time(52));
        assert!(w.poll_report().is_none_or(|r| r.finished_recving.is_empty()));
        assert!(!w.is_drained());
        w.handle_transfer_done(Time(60), token, Ok(figures()));
        assert_eq!(failed(w.poll_report()), [("a".to_string(), Cause::PeerDied)], "the first cause counts, once");
        assert!(w.is_drained() && w.poll_report().is_none());
    }

    #[test]
    fn bad_block_lists_fail_the_load_and_give_the_blocks_back() {
        for (lists, word) in [
            ([&[3, 4][..], &[5][..]], "tokens 0 to 4 are to be loaded, the other side holds 2"),
            ([&[BLOCKS][..], &[5][..]], "200"),
            ([&[3, 3][..], &[5, 6][..]], "3"),
        ] {
            let mut w = worker(config());
            loads(&mut w, 10, load("a", lists));
            let session = handshake(&mut w);
            answer(&mut w, 20, session, 9, &ranks(9));
            let peer = connect(&mut w);
            w.handle_connected(Time(25), &peer);
            let report = w.poll_report().unwrap();
            assert_eq!(report.failed_recving[0].cause, Cause::InvalidRequest);
            let text = &report.failed_recving[0].message;
            assert!(text.contains(word), "{text}");
            let kinds: Vec<bool> = actions(&mut w)
                .iter()
                .filter_map(|a| match a {
                    Action::Send { message: PeerMessage::Release { .. }, .. } => Some(true),
                    Action::Transfer { .. } => Some(false),
                    _ => None,
                })
                .collect();
            assert_eq!(kinds, [true], "a release and no transfer");
        }
    }

    #[test]
    fn a_refused_load_is_reported_at_once_and_released_when_connected() {
        let mut w = worker(config());
        let refused = Load { refused: Some("group 0: nothing fits".into()), ..load("a", [&[3, 4], &[5]]) };
        loads(&mut w, 10, refused);
        let report = w.poll_report().unwrap();
        assert_eq!(report.failed_recving[0].message, "group 0: nothing fits");
        assert_eq!(report.failed_recving[0].invalid_blocks.ids(), [3, 4]);
        let session = handshake(&mut w);
        answer(&mut w, 20, session, 9, &ranks(9));
        let peer = connect(&mut w);
        w.handle_connected(Time(25), &peer);
        assert!(matches!(actions(&mut w)[..], [Action::Send { message: PeerMessage::Release { .. }, .. }]));
        assert!(w.poll_report().is_some_and(|r| r.finished_recving.is_empty()));
    }

    #[test]
    fn a_handshake_without_an_answer_names_the_listener() {
        let mut w = worker(config());
        loads(&mut w, 0, load("a", [&[3], &[4]]));
        handshake(&mut w);
        w.handle_timeout(Time(config().handshake_timeout_ms * MS));
        let report = w.poll_report().unwrap();
        assert_eq!(report.failed_recving[0].cause, Cause::HandshakeFailed);
        let message = &report.failed_recving[0].message;
        assert!(message.contains("within 30000 ms; its listener is 10.0.0.1 port 5680"), "{message}");
    }

    #[test]
    fn a_failed_handshake_fails_loads_forgets_holds_and_is_tried_again_for_a_load() {
        let mut w = worker(config());
        let hold = |name: &str| Hold { request: request(name), remote: remote(&format!("p-{name}")) };
        let step = StepMetadata {
            holds: vec![hold("held")],
            loads: vec![load("loaded", [&[3], &[4]])],
            releases: vec![Release { request: request("gone"), remote: remote("p-gone") }],
            ..Default::default()
        };
        w.handle_step(Time(0), step);
        let session = handshake(&mut w);
        w.handle_handshake(Time(10), session, Err(failure()));
        assert_eq!(failed(w.poll_report()), [("loaded".to_string(), Cause::HandshakeFailed)]);
        let g = w.gauges();
        assert_eq!((g.holds, g.loads, g.releases, g.sessions), (0, 0, 0, 0));
        w.handle_step(Time(20), StepMetadata { holds: vec![hold("h2")], ..Default::default() });
        assert!(actions(&mut w).is_empty(), "a hold so soon after is not worth a handshake");
        loads(&mut w, 30, load("l2", [&[3], &[4]]));
        let session = handshake(&mut w);
        answer(&mut w, 40, session, 9, &ranks(9));
        let _ = connect(&mut w);
        w.handle_step(Time(2_000 * MS), StepMetadata { holds: vec![hold("h3")], ..Default::default() });
        assert_eq!(w.gauges().holds, 1);
    }

    #[test]
    fn an_engine_of_another_life_or_model_is_refused_by_name() {
        let mut w = worker(config());
        loads(&mut w, 10, load("a", [&[3], &[4]]));
        let session = handshake(&mut w);
        answer(&mut w, 20, session, 10, &ranks(10));
        let report = w.poll_report().unwrap();
        assert_eq!(report.failed_recving[0].cause, Cause::PeerDied);
        assert!(report.failed_recving[0].message.contains("000000000000000a"), "{:?}", report.failed_recving);
        loads(&mut w, 30, load("b", [&[3], &[4]]));
        let session = handshake(&mut w);
        let mut other = ranks(9);
        other[0].geometry.areas[0].total_heads = 2;
        answer(&mut w, 40, session, 9, &other);
        let report = w.poll_report().unwrap();
        assert_eq!(report.failed_recving[0].cause, Cause::Incompatible);
        assert!(
            report.failed_recving[0].message.contains("number of KV heads of the model"),
            "{:?}",
            report.failed_recving
        );
    }

    #[test]
    fn one_handshake_serves_all_requests_to_an_engine() {
        let mut w = worker(config());
        for name in ["a", "b", "c"] {
            loads(&mut w, 10, load(name, [&[3], &[4]]));
        }
        let found = actions(&mut w);
        assert_eq!(found.len(), 1, "{found:?}");
        answer(&mut w, 20, SessionId(1), 9, &ranks(9));
        let peer = connect(&mut w);
        w.handle_connected(Time(25), &peer);
        let posted = actions(&mut w).iter().filter(|a| matches!(a, Action::Transfer { .. })).count();
        assert_eq!((posted, w.gauges().sessions, w.gauges().peers), (3, 1, 1));
        loads(&mut w, 30, load("d", [&[5], &[6]]));
        assert!(matches!(transfer(&mut w), TransferToken(_)));
    }

    fn by(host: &str, incarnation: Option<u64>, load: Load) -> Load {
        let remote = Remote { host: host.into(), incarnation: incarnation.map(Incarnation), ..load.remote };
        Load { remote, ..load }
    }

    #[test]
    fn one_life_of_an_engine_is_one_session_by_whatever_name() {
        let mut w = worker(config());
        let (peer, _) = reading(&mut w, "a");
        // Another name has to be asked who it is, and once, whether or not the request names the life.
        for (host, life) in [("localhost", Some(9)), ("p.example", None)] {
            for (name, block) in [("b", 7), ("c", 9)] {
                loads(&mut w, 40, by(host, life, load(&format!("{name}-{host}"), [&[block], &[block]])));
            }
            let session = handshake(&mut w);
            answer(&mut w, 50, session, 9, &ranks(9));
            let done = does(&mut w);
            assert_eq!((done.connects.len(), done.transfers.len()), (0, 2));
            assert_eq!(done.transfers[0].1, peer);
            loads(&mut w, 60, by(host, life, load(&format!("d-{host}"), [&[11], &[12]])));
            assert_eq!(does(&mut w).transfers.len(), 1);
        }
        assert_eq!((w.gauges().sessions, w.gauges().peers), (1, 1));
    }

    #[test]
    fn what_another_listener_says_of_an_engine_moves_nobody_s_requests() {
        let impostor = |change: &dyn Fn(&mut RankMetadata)| {
            let mut ranks = ranks(9);
            change(&mut ranks[0]);
            ranks
        };
        let stories = [
            impostor(&|rank| rank.agent.incarnation = Incarnation(4711)),
            impostor(&|rank| rank.agent.address = b"elsewhere".to_vec()),
            impostor(&|rank| {
                for area in &mut rank.geometry.areas {
                    (area.offset, area.num_blocks) = (area.offset + 8 * area.block_stride, area.num_blocks - 8);
                }
            }),
        ];
        for story in stories {
            for honest_first in [true, false] {
                let mut w = worker(config());
                let mut peers = Vec::new();
                let mut hosts = [("h", ranks(9)), ("impostor", story.clone())];
                if !honest_first {
                    hosts.reverse();
                }
                for (n, (host, ranks)) in hosts.iter().enumerate() {
                    let name = format!("first-{n}");
                    loads(&mut w, 10, by(host, (n == 1).then_some(9), load(&name, [&[3], &[4]])));
                    let session = handshake(&mut w);
                    answer(&mut w, 20, session, 9, ranks);
                    peers.push(connect(&mut w));
                    w.handle_connected(Time(25), &peers[n]);
                    assert_eq!(does(&mut w).transfers[0].1, peers[n]);
                }
                for (n, (host, _)) in hosts.iter().enumerate() {
                    for life in [None, Some(9)] {
                        loads(&mut w, 30, by(host, life, load(&format!("{n}-{life:?}"), [&[5], &[6]])));
                        assert_eq!(does(&mut w).transfers[0].1, peers[n], "by {host}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_name_that_leads_to_another_life_is_followed() {
        let mut w = worker(config());
        let (old, token) = reading(&mut w, "a");
        loads(&mut w, 30, by("10.0.0.1", Some(10), load("b", [&[5], &[6]])));
        let session = handshake(&mut w);
        // Its agents are those of the former life, as when only the listener's process started anew: the driver has one
        // connection to each, and says so.
        answer(&mut w, 40, session, 10, &ranks(9));
        let new = connect(&mut w);
        w.handle_peer_lost(Time(41), &PeerRef::Outbound(old), "its agent serves another session");
        w.handle_connected(Time(42), &new);
        let done = does(&mut w);
        assert_eq!((done.cancels, done.transfers.len()), (vec![token], 1));
        w.handle_transfer_done(Time(43), token, Err((Cause::Aborted, "cancelled".into())));
        assert_eq!(failed(w.poll_report()), [("a".to_string(), Cause::PeerDied)], "nothing waits for what is gone");
        loads(&mut w, 50, by("10.0.0.1", None, load("c", [&[7], &[8]])));
        assert_eq!(does(&mut w).transfers[0].1, new);
        assert_eq!((w.gauges().sessions, w.gauges().peers), (1, 1));
    }

    #[test]
    fn names_of_an_engine_are_not_remembered_without_end() {
        let mut w = worker(config());
        let _ = reading(&mut w, "a");
        for n in 0..40 {
            loads(&mut w, 30, by(&format!("host-{n}"), None, load(&format!("b{n}"), [&[5], &[6]])));
            let session = handshake(&mut w);
            answer(&mut w, 40, session, 9, &ranks(9));
            assert_eq!(does(&mut w).transfers.len(), 1);
        }
        loads(&mut w, 50, by("host-39", None, load("late", [&[5], &[6]])));
        assert_eq!(does(&mut w).transfers.len(), 1, "the latest names are known");
        loads(&mut w, 51, by("host-3", None, load("early", [&[5], &[6]])));
        let session = handshake(&mut w);
        answer(&mut w, 52, session, 9, &ranks(9));
        assert_eq!((does(&mut w).transfers.len(), w.gauges().sessions), (1, 1));
    }

    #[test]
    fn a_request_that_comes_after_the_last_done_says_so_at_once() {
        let mut w = worker(config());
        let (peer, token) = reading(&mut w, "a");
        w.handle_transfer_done(Time(80), token, Ok(figures()));
        let said = actions(&mut w).into_iter().find_map(|action| match action {
            Action::Send { message: PeerMessage::Done { more, lease_id, .. }, .. } => Some((more, lease_id)),
            _ => None,
        });
        assert_eq!(said, Some((false, 1)));
        // Other ranks may still hold the lease: this one wants it again, before anything else.
        loads(&mut w, 90, Load { request: request("b"), ..load("a", [&[5], &[4]]) });
        let Some(Action::Send { peer: to, message: PeerMessage::Heartbeat { requests, leases, reader } }) =
            w.poll_action()
        else {
            panic!("a heartbeat")
        };
        assert_eq!((to, requests, leases), (PeerRef::Outbound(peer), vec![request("p-a")], vec![1]));
        assert_eq!(reader.map(|r| (r.engine, r.incarnation, r.rank)), Some((engine("me"), Incarnation(77), RANK)));
    }

    #[test]
    fn unused_peers_are_disconnected_after_their_time() {
        let mut w = worker(config());
        let (_, token) = reading(&mut w, "a");
        w.handle_transfer_done(Time(80), token, Err((Cause::TransportError, "bad".into())));
        assert_eq!(failed(w.poll_report()), [("a".to_string(), Cause::TransportError)]);
        let _ = actions(&mut w);
        assert_eq!(w.poll_timeout(), Some(Time(600_000 * MS + 80)));
        w.handle_timeout(Time(600_000 * MS + 80));
        assert!(matches!(actions(&mut w)[..], [Action::Disconnect { .. }]));
        assert_eq!((w.gauges(), w.poll_timeout()), (Default::default(), None));
    }

    #[test]
    fn a_hold_does_not_last_forever() {
        let mut w = worker(WorkerConfig { hold_timeout_ms: 5_000, ..config() });
        let hold = Hold { request: request("a"), remote: remote("p-a") };
        w.handle_step(Time(0), StepMetadata { holds: vec![hold], ..Default::default() });
        let session = handshake(&mut w);
        answer(&mut w, 20, session, 9, &ranks(9));
        let peer = connect(&mut w);
        w.handle_connected(Time(25), &peer);
        let mut beats = 0;
        let mut released = false;
        while let Some(due) = w.poll_timeout().filter(|due| *due <= Time(5_000 * MS)) {
            w.handle_timeout(due);
            for action in actions(&mut w) {
                match action {
                    Action::Send { message: PeerMessage::Heartbeat { .. }, .. } => beats += 1,
                    Action::Send { message: PeerMessage::Release { .. }, .. } => released = true,
                    other => panic!("unexpected {other:?}"),
                }
            }
        }
        assert!(released);
        assert_eq!(beats, 1 + 24, "a lease of 1200 ms is renewed every 200 ms, and once when connected");
        assert_eq!(w.gauges().holds, 0);
    }

    /// A machine that holds all heads, and producer ranks that hold one each.
    const MANY: u32 = 12;
    /// How many of them are connected to at a time.
    const AT_A_TIME: usize = 8;

    fn many_heads() -> Worker {
        let mut local = metadata(engine("me"), 77, 8 * u64::from(MANY));
        for area in &mut local.geometry.areas {
            (area.heads, area.total_heads) = (MANY, MANY);
        }
        let mut w = Worker::new(config()).unwrap();
        w.set_local(Arc::new(local));
        w
    }

    fn many_ranks() -> Vec<RankMetadata> {
        let shape = EngineShape { tp: MANY, ..SHAPE };
        let rank = |tp: u32| {
            let mut remote = metadata(engine("p"), 1_000 + u64::from(tp), 8);
            (remote.rank.tp, remote.shape) = (tp, shape);
            for area in &mut remote.geometry.areas {
                (area.first_head, area.total_heads) = (tp, MANY);
            }
            remote
        };
        (0..MANY).map(rank).collect()
    }

    /// What a machine does about several ranks, in order.
    #[derive(Default)]
    struct Done {
        connects: Vec<PeerKey>,
        transfers: Vec<(TransferToken, PeerKey)>,
        beats: Vec<PeerRef>,
        dones: Vec<(PeerRef, u64)>,
        releases: Vec<PeerRef>,
        cancels: Vec<TransferToken>,
        disconnects: Vec<PeerKey>,
    }

    fn does(w: &mut Worker) -> Done {
        let mut done = Done::default();
        for action in actions(w) {
            match action {
                Action::Connect { peer, .. } => done.connects.push(peer),
                Action::Transfer { token, peer, .. } => done.transfers.push((token, peer)),
                Action::Send { peer, message: PeerMessage::Heartbeat { .. } } => done.beats.push(peer),
                Action::Send { peer, message: PeerMessage::Done { serial, .. } } => done.dones.push((peer, serial)),
                Action::Send { peer, message: PeerMessage::Release { .. } } => done.releases.push(peer),
                Action::Cancel { token } => done.cancels.push(token),
                Action::Disconnect { peer } => done.disconnects.push(peer),
                other => panic!("not expected: {other:?}"),
            }
        }
        done
    }

    /// A load with many ranks; gives those that are being connected to.
    fn meeting(w: &mut Worker) -> Vec<PeerKey> {
        loads(w, 10, load("a", [&[3], &[4]]));
        let session = handshake(w);
        answer(w, 20, session, 9, &many_ranks());
        let first = does(w);
        assert_eq!((first.connects.len(), first.transfers.len(), first.beats.len()), (AT_A_TIME, 0, 0));
        first.connects
    }

    #[test]
    fn each_rank_is_read_from_as_soon_as_it_is_connected_and_confirmed_with_all() {
        let mut w = many_heads();
        let mut connecting: std::collections::VecDeque<PeerKey> = meeting(&mut w).into();
        let (mut tokens, mut peers) = (Vec::new(), Vec::new());
        while let Some(peer) = connecting.pop_front() {
            w.handle_connected(Time(30), &peer);
            let done = does(&mut w);
            assert_eq!(done.beats, [PeerRef::Outbound(peer.clone())], "kept alive from now on, once");
            let [(token, read)] = &done.transfers[..] else { panic!("one read") };
            assert_eq!(*read, peer);
            // The first ranks are read before the last ones are even connected to.
            w.handle_transfer_done(Time(70), *token, Ok(figures()));
            tokens.push(*token);
            peers.push(peer.clone());
            // Connected twice is connected once.
            w.handle_connected(Time(31), &peer);
            connecting.extend(done.connects);
            let confirmed = does(&mut w);
            assert!(confirmed.transfers.is_empty() && confirmed.beats.is_empty());
            let last = peers.len() == MANY as usize;
            assert_eq!(confirmed.dones.len(), if last { MANY as usize } else { 0 });
            for ((to, serial), rank) in confirmed.dones.into_iter().zip(&peers) {
                assert_eq!(to, PeerRef::Outbound(rank.clone()));
                assert!(w.poll_report().is_none_or(|r| r.finished_recving.is_empty()));
                let verdict = PeerMessage::Verdict { request: request("p-a"), verdict: Verdict::Valid, serial };
                w.handle_message(Time(100), &to, verdict);
            }
        }
        assert_eq!(peers.len(), MANY as usize);
        let report = w.poll_report().unwrap();
        assert_eq!((report.finished_recving, report.failed_recving), (vec![request("a")], vec![]));
        assert_eq!(report.records[0].bytes, 8 * u64::from(MANY));
    }

    #[test]
    fn a_load_that_comes_while_ranks_are_connected_reads_from_those_that_are() {
        let mut w = many_heads();
        let connecting = meeting(&mut w);
        for peer in &connecting[..3] {
            w.handle_connected(Time(30), peer);
        }
        let _ = does(&mut w);
        // A hold, which is then a load, and a load at once.
        w.handle_step(
            Time(40),
            StepMetadata {
                holds: vec![Hold { request: request("b"), remote: load("b", [&[5], &[6]]).remote }],
                ..Default::default()
            },
        );
        let held = does(&mut w);
        assert_eq!((held.beats.len(), held.transfers.len()), (3, 0));
        loads(&mut w, 41, load("b", [&[5], &[6]]));
        let loaded = does(&mut w);
        assert_eq!((loaded.beats.len(), loaded.transfers.len()), (0, 3));
        loads(&mut w, 42, load("c", [&[7], &[8]]));
        let third = does(&mut w);
        assert_eq!((third.beats.len(), third.transfers.len()), (3, 3));
        w.handle_connected(Time(43), &connecting[3]);
        let next = does(&mut w);
        assert_eq!((next.beats.len(), next.transfers.len()), (3, 3));
        assert!(next.transfers.iter().all(|(_, peer)| *peer == connecting[3]));
    }

    #[test]
    fn an_abort_while_ranks_are_connected_waits_for_its_reads_and_tells_all_ranks_when_they_are() {
        let mut w = many_heads();
        let mut connecting: std::collections::VecDeque<PeerKey> = meeting(&mut w).into();
        let first = connecting.pop_front().unwrap();
        w.handle_connected(Time(30), &first);
        let begun = does(&mut w);
        connecting.extend(begun.connects);
        let token = begun.transfers[0].0;
        w.handle_step(Time(40), StepMetadata { aborts: vec![request("a")], ..Default::default() });
        assert_eq!(does(&mut w).cancels, [token]);
        assert!(w.poll_report().is_none_or(|r| r.finished_recving.is_empty()));
        // Ranks that come now are of no use to it.
        let second = connecting.pop_front().unwrap();
        w.handle_connected(Time(41), &second);
        let done = does(&mut w);
        assert!(done.transfers.is_empty() && done.beats.is_empty());
        connecting.extend(done.connects);
        w.handle_transfer_done(Time(50), token, Err((Cause::Aborted, "cancelled".into())));
        assert_eq!(failed(w.poll_report()), [("a".to_string(), Cause::Aborted)]);
        while let Some(peer) = connecting.pop_front() {
            w.handle_connected(Time(60), &peer);
            let done = does(&mut w);
            assert!(done.transfers.is_empty() && done.beats.is_empty());
            connecting.extend(done.connects);
            assert_eq!(done.releases.len(), if connecting.is_empty() { MANY as usize } else { 0 });
        }
    }

    #[test]
    fn a_load_given_up_while_ranks_are_connected_leaves_the_lease_to_another_one_of_the_same_request() {
        let mut w = many_heads();
        let mut connecting: std::collections::VecDeque<PeerKey> = meeting(&mut w).into();
        loads(&mut w, 11, Load { request: request("b"), ..load("a", [&[5], &[4]]) });
        let first = connecting.pop_front().unwrap();
        w.handle_connected(Time(30), &first);
        let begun = does(&mut w);
        assert_eq!((begun.beats.len(), begun.transfers.len()), (1, 2));
        connecting.extend(begun.connects);
        w.handle_step(Time(40), StepMetadata { aborts: vec![request("a")], ..Default::default() });
        let cancelled = does(&mut w).cancels;
        let mut beats = 1;
        // The next rank is connected while what was cancelled is under way, the others when it has ended.
        for (index, now) in (41..).enumerate() {
            let Some(peer) = connecting.pop_front() else { break };
            w.handle_connected(Time(now), &peer);
            let done = does(&mut w);
            assert!(done.releases.is_empty());
            beats += done.beats.len();
            connecting.extend(done.connects);
            for token in cancelled.iter().filter(|_| index == 0) {
                w.handle_transfer_done(Time(now), *token, Err((Cause::Aborted, "cancelled".into())));
            }
        }
        assert_eq!(beats, MANY as usize);
        // And goes on, on every rank.
        let due = w.poll_timeout().unwrap();
        w.handle_timeout(Time(due.0 + 30));
        assert_eq!(does(&mut w).beats.len(), MANY as usize);
    }

    #[test]
    fn a_rank_that_cannot_be_reached_fails_the_load_after_its_reads_from_the_others() {
        let mut w = many_heads();
        let connecting = meeting(&mut w);
        w.handle_connected(Time(30), &connecting[0]);
        let begun = does(&mut w);
        let token = begun.transfers[0].0;
        w.handle_peer_lost(Time(40), &PeerRef::Outbound(connecting[1].clone()), "no route");
        assert_eq!(does(&mut w).cancels, [token]);
        assert!(w.poll_report().is_none_or(|r| r.finished_recving.is_empty()));
        w.handle_transfer_done(Time(50), token, Ok(figures()));
        assert_eq!(failed(w.poll_report()), [("a".to_string(), Cause::PeerDied)]);
        let done = does(&mut w);
        assert_eq!(done.releases, [PeerRef::Outbound(connecting[0].clone())]);
        // Only what was begun is undone: eight, and the ninth that came when the first was connected, without the lost one.
        assert_eq!((begun.connects.len(), done.disconnects.len()), (1, AT_A_TIME));
        assert!(w.is_drained() && w.gauges().peers == 0);
    }

    #[test]
    fn without_a_geometry_a_load_fails_and_says_why() {
        let mut w = Worker::new(config()).unwrap();
        loads(&mut w, 10, load("a", [&[3], &[4]]));
        let report = w.poll_report().unwrap();
        assert_eq!(report.failed_recving[0].cause, Cause::InvalidRequest);
        assert!(report.failed_recving[0].message.contains("set_geometry"));
    }
}

#[test]
fn defaults_are_those_of_the_page() {
    let page = include_str!("../docs/protocol.md");
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
fn bad_settings_are_named() {
    type Change = fn(&mut WorkerConfig);
    let cases: [(&str, Change); 4] = [
        ("heartbeat_divisor", |c| c.heartbeat_divisor = 1),
        ("verdict_timeout_ms", |c| c.verdict_timeout_ms = 0),
        ("shape", |c| c.shape.tp = 0),
        ("rank", |c| c.rank.pp = 7),
    ];
    for (key, change) in cases {
        let mut c = config();
        change(&mut c);
        let e = Worker::new(c).unwrap_err();
        assert!(e.message().starts_with(key), "{e}");
    }
}
