//! Loads and holds: what a consumer asks of producers and tells its engine.

use super::*;

mod many_ranks;

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

fn loads(w: &mut WorkerMachine, now: u64, load: Load) {
    w.handle_step(Time(now), StepMetadata { loads: vec![load], ..Default::default() });
}

/// The ranks of the engine "p" in the life `incarnation`.
fn ranks(incarnation: u64) -> Vec<RankMetadata> {
    vec![metadata(engine("p"), 1_000 + incarnation, 8)]
}

fn answer(w: &mut WorkerMachine, now: u64, session: SessionId, incarnation: u64, ranks: &[RankMetadata]) {
    w.handle_handshake(Time(now), session, Ok(reply(session, incarnation, ranks)));
}

fn failure() -> HandshakeFailure {
    HandshakeFailure { cause: Cause::HandshakeFailed, message: "refused".into() }
}

fn handshake(w: &mut WorkerMachine) -> SessionId {
    let found = actions(w).into_iter().find_map(|action| match action {
        Action::Handshake { session, .. } => Some(session),
        _ => None,
    });
    found.expect("a handshake")
}

fn connect(w: &mut WorkerMachine) -> PeerKey {
    let found = actions(w).into_iter().find_map(|action| match action {
        Action::Connect { peer, .. } => Some(peer),
        _ => None,
    });
    found.expect("a connect")
}

fn transfer(w: &mut WorkerMachine) -> TransferToken {
    let found = actions(w).into_iter().find_map(|action| match action {
        Action::Transfer { token, .. } => Some(token),
        _ => None,
    });
    found.expect("a transfer")
}

fn done_serial(w: &mut WorkerMachine) -> u64 {
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
fn reading(w: &mut WorkerMachine, name: &str) -> (PeerKey, TransferToken) {
    loads(w, 10, load(name, [&[3], &[4]]));
    let session = handshake(w);
    answer(w, 20, session, 9, &ranks(9));
    let peer = connect(w);
    w.handle_connected(Time(25), &peer);
    (peer, transfer(w))
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

fn does(w: &mut WorkerMachine) -> Done {
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
    let verdict = |serial, name: &str, verdict| PeerMessage::Verdict { request: request(name), verdict, serial };
    let ours = PeerRef::Outbound(peer);
    for serial in 0..100 {
        w.handle_message(Time(45), &ours, verdict(serial, "p-a", Verdict::Expired));
    }
    w.handle_transfer_done(Time(80), token, Ok(figures()));
    w.handle_transfer_done(Time(81), token, Err((Cause::PeerDied, "again".into())));
    let serial = done_serial(&mut w);
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
    let again = StepMetadata { aborts: vec![request("a")], loads: vec![load("a", [&[3], &[4]])], ..Default::default() };
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
        ([&[BLOCKS][..], &[5][..]], "600"),
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
    w.handle_timeout(Time(settings().handshake_timeout_ms * MS));
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
    // Over the first connection, and over a new one.
    answer(&mut w, 20, session, 10, &ranks(10));
    assert_eq!(handshake(&mut w), session);
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
    let Some(Action::Send { peer: to, message: PeerMessage::Heartbeat { requests, leases, reader } }) = w.poll_action()
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
fn an_engine_that_falls_asleep_gives_back_what_it_loads_and_nothing_that_waits() {
    for suspends in [true, false] {
        let mut w = worker(config());
        let hold = Hold { request: request("waits"), remote: remote("p-waits") };
        loads(&mut w, 10, load("a", [&[3], &[4]]));
        w.handle_step(Time(11), StepMetadata { holds: vec![hold], ..Default::default() });
        let session = handshake(&mut w);
        answer(&mut w, 20, session, 9, &ranks(9));
        let peer = connect(&mut w);
        w.handle_connected(Time(25), &peer);
        let token = transfer(&mut w);
        if suspends {
            w.handle_suspend(Time(30))
        } else {
            w.handle_shutdown(Time(30))
        }
        let released = |w: &mut WorkerMachine| -> Vec<String> {
            let releases = actions(w).into_iter().filter_map(|action| match action {
                Action::Send { message: PeerMessage::Release { request, .. }, .. } => Some(request.to_string()),
                _ => None,
            });
            releases.collect()
        };
        assert_eq!(released(&mut w), if suspends { vec![] } else { vec!["p-waits"] });
        // The load that is cut off is over, for the engine and for the producer.
        w.handle_transfer_done(Time(40), token, Err((Cause::Aborted, "cancelled".into())));
        assert_eq!(failed(w.poll_report()), [("a".to_string(), Cause::ShutDown)]);
        assert_eq!(released(&mut w), ["p-a"]);
    }
}

#[test]
fn an_unanswered_read_names_the_request() {
    let mut w = worker(config());
    let (_, token) = reading(&mut w, "a");
    w.handle_transfer_done(Time(70), token, Ok(figures()));
    done_serial(&mut w);
    w.handle_timeout(Time(70 + settings().verdict_timeout_ms * MS));
    let report = w.poll_report().unwrap();
    let failure = report.failed_recving.first().unwrap();
    assert_eq!(failure.cause, Cause::Timeout);
    for part in ["no verdict within", "engine p has granted no lease of request p-a", "remote_request_id"] {
        assert!(failure.message.contains(part), "{part:?} is not in {}", failure.message);
    }
}

#[test]
fn a_hold_does_not_last_forever() {
    let mut w = worker(with(WorkerSettings { hold_timeout_ms: 5_000, ..settings() }));
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

#[test]
fn a_prefill_without_a_sign_is_not_awaited_forever() {
    let limits = WorkerSettings { await_timeout_ms: 5_000, hold_timeout_ms: 9_000, chunk_tokens: 1, ..settings() };
    for sign in [false, true] {
        let mut w = worker(with(limits.clone()));
        let mut wanted = load("a", [&[3], &[4]]);
        (wanted.awaits, wanted.remote_tokens, wanted.remote_blocks) = (true, 0, vec![Blocks::default(); 2]);
        loads(&mut w, 0, wanted);
        let number = actions(&mut w).into_iter().find_map(|action| match action {
            Action::Await { number, .. } => Some(number),
            _ => None,
        });
        if sign {
            let blocks = vec![Blocks::default(); 2];
            let prefill = Prefill { request: request("p-a"), blocks, tokens: 0, lease_ms: 1_200, lease_id: 7 };
            let progress = PrefillProgress { incarnation: Incarnation(9), prefill, over: false };
            w.handle_prefill(Time(4_000 * MS), number.unwrap(), Ok(progress));
        }
        let (just_before, limit, text) =
            if sign { (12_999, 13_000, "9000 ms") } else { (4_999, 5_000, "said nothing") };
        w.handle_timeout(Time(just_before * MS));
        assert!(w.poll_report().is_none_or(|report| report.finished_recving.is_empty()));
        w.handle_timeout(Time(limit * MS));
        let report = w.poll_report().unwrap();
        let [failure] = &report.failed_recving[..] else { panic!("{report:?}") };
        assert_eq!(failure.cause, Cause::Timeout);
        assert!(failure.message.contains(text), "{}", failure.message);
    }
}

#[test]
fn without_a_geometry_a_load_fails_and_says_why() {
    let mut w = WorkerMachine::new(config()).unwrap();
    loads(&mut w, 10, load("a", [&[3], &[4]]));
    let report = w.poll_report().unwrap();
    assert_eq!(report.failed_recving[0].cause, Cause::InvalidRequest);
    assert!(report.failed_recving[0].message.contains("set_geometry"));
}

#[test]
fn another_life_is_asked_for_anew_once() {
    let asks = |w: &mut WorkerMachine| {
        let found = actions(w).into_iter().find_map(|action| match action {
            Action::Handshake { session, anew, .. } => Some((session, anew)),
            _ => None,
        });
        found.expect("a handshake")
    };
    // The connection leads to the engine before, the name to its successor.
    let mut w = worker(config());
    loads(&mut w, 10, load("a", [&[3], &[4]]));
    let (session, anew) = asks(&mut w);
    assert!(!anew);
    answer(&mut w, 20, session, 8, &ranks(8));
    assert_eq!(asks(&mut w), (session, true));
    answer(&mut w, 30, session, 9, &ranks(9));
    assert_eq!(connect(&mut w).incarnation, ranks(9)[0].agent.incarnation);
    // It is gone: the engine's later life answers over a new connection too.
    let mut w = worker(config());
    loads(&mut w, 10, load("a", [&[3], &[4]]));
    let (session, _) = asks(&mut w);
    answer(&mut w, 20, session, 10, &ranks(10));
    assert_eq!(asks(&mut w), (session, true));
    answer(&mut w, 30, session, 10, &ranks(10));
    let report = w.poll_report().unwrap();
    let [failure] = &report.failed_recving[..] else { panic!("{report:?}") };
    let lives = [Incarnation(9), Incarnation(10)].map(|life| life.to_string());
    assert_eq!(failure.cause, Cause::PeerDied);
    assert!(lives.iter().all(|life| failure.message.contains(life)), "{}", failure.message);
}
