//! Leases and the judgement of reads.

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
    let report = w.poll_report().unwrap();
    assert_eq!((report.finished_sending, report.stats.sends_read), (vec![request("r")], 1));
    assert!(w.poll_report().is_none(), "what was reported is not counted again");
}

#[test]
fn the_trace_says_how_a_lease_ended() {
    let mut w = worker(WorkerMachineConfig { trace: true, ..config() });
    ["read", "released", "dropped", "expired"].into_iter().for_each(|name| grants(&mut w, 0, grant(name, 1)));
    w.handle_message(Time(1), &from(), done("read", 1, 1, 10));
    let release = PeerMessage::Release { request: request("released"), lease_id: 1, reader: reader(1), readers: 1 };
    w.handle_message(Time(2), &from(), release);
    w.handle_step(Time(3), StepMetadata { dropped: vec![request("dropped")], ..Default::default() });
    w.handle_timeout(Time(1_000 * MS));
    let mut ended = 0;
    while let Some(life) = w.poll_trace() {
        let TraceEvent::SendEnded { request, how, .. } = life else { continue };
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
fn a_drop_says_nothing_of_a_later_request_of_its_name() {
    let mut w = worker(config());
    let dropped = || StepMetadata { dropped: vec![request("r")], ..Default::default() };
    let read_of = |lease_id, serial| PeerMessage::Done {
        request: request("r"),
        lease_id,
        reader: reader(1),
        readers: 1,
        serial,
        more: false,
    };
    w.handle_step(Time(0), dropped());
    // The later one's answer is out before this rank has its grant.
    w.handle_message(Time(1), &from(), read_of(2, 7));
    assert!(verdicts(&mut w).is_empty());
    grants(&mut w, 2, grant("r", 2));
    assert_eq!(verdicts(&mut w), [(7, Verdict::Valid)]);
    w.handle_step(Time(3), dropped());
    w.handle_message(Time(4), &from(), read_of(2, 7));
    w.handle_message(Time(5), &from(), read_of(2, 8));
    assert_eq!(verdicts(&mut w), [(7, Verdict::Valid), (8, Verdict::Expired)], "of a lease that was over before it");
    let release = PeerMessage::Release { request: request("r"), lease_id: 3, reader: reader(1), readers: 1 };
    w.handle_message(Time(5), &from(), release);
    grants(&mut w, 6, grant("r", 3));
    assert_eq!(w.leases(), 0, "it was given back before it was known");
}

#[test]
fn a_request_id_used_again_is_another_lease() {
    let mut w = worker(config());
    assert_eq!(w.leases(), 0);
    grants(&mut w, 0, grant("r", 1));
    grants(&mut w, 0, grant("other", 3));
    assert_eq!(w.leases(), 2);
    w.handle_message(
        Time(1),
        &from(),
        PeerMessage::Release { request: request("other"), lease_id: 3, reader: reader(2), readers: 1 },
    );
    assert_eq!((w.leases(), sent(&mut w).len()), (1, 1));
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
    let mut w = worker(WorkerMachineConfig { early_messages: 10, tombstones: 20, ..config() });
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

/// As vLLM deals the samples of a prompt to the data-parallel engines of a decode server.
#[test]
fn a_lease_may_have_several_consumer_engines_that_name_it() {
    let mut w = worker(config());
    grants(&mut w, 0, grant("r", 7));
    let other = Reader { engine: engine("other"), ..reader(2) };
    let third = Reader { engine: engine("third"), ..reader(3) };
    let done = |reader: &Reader, lease_id, serial| PeerMessage::Done {
        request: request("r"),
        lease_id,
        reader: reader.clone(),
        readers: 2,
        serial,
        more: false,
    };
    w.handle_message(Time(0), &from(), done(&third, 0, 9));
    w.handle_message(Time(0), &from(), beat(vec![7], Some(other.clone())));
    w.handle_message(Time(1), &from(), of_lease(7, 1, 10, false));
    w.handle_message(Time(1), &from(), of_lease(7, 2, 11, false));
    assert!(sent(&mut w).is_empty(), "the other engine has said that it wants it");
    w.handle_message(Time(2), &from(), done(&third, 0, 12));
    w.handle_message(Time(2), &from(), done(&third, 8, 13));
    w.handle_message(Time(2), &from(), done(&other, 7, 14));
    assert!(sent(&mut w).is_empty(), "of its two readers one has been heard");
    w.handle_message(Time(3), &from(), done(&Reader { rank: RankId { pp: 0, tp: 7 }, ..other }, 7, 15));
    let (valid, unknown) = (Verdict::Valid, Verdict::Unknown);
    let all = [(9, valid), (10, valid), (11, valid), (12, unknown), (13, Verdict::Expired), (14, valid), (15, valid)];
    assert_eq!((verdicts(&mut w), sent(&mut w).len()), (all.to_vec(), 1));
}

#[test]
fn consumer_engines_of_a_lease_are_bounded() {
    let mut w = worker(config());
    grants(&mut w, 0, grant("r", 7));
    for n in 0..100 {
        let reader = Reader { engine: engine(&format!("e{n}")), ..reader(1) };
        let done = PeerMessage::Done { request: request("r"), lease_id: 7, reader, readers: 1, serial: n, more: true };
        w.handle_message(Time(1), &from(), done);
    }
    let heard = verdicts(&mut w);
    assert_eq!(heard.iter().filter(|(_, verdict)| *verdict == Verdict::Valid).count(), 64);
}

#[test]
fn heartbeats_count_from_readers_that_name_the_lease() {
    // (what says that it wants the lease, every half second; how long the lease then lasts, in its lengths)
    let stranger = Some(Reader { engine: engine("stranger"), ..reader(9) });
    let cases = [
        ("its reader", vec![7], Some(reader(1)), true, None),
        ("a guess", vec![8], stranger.clone(), false, Some(1_000)),
        ("another engine that was given the id", vec![7], stranger.clone(), true, None),
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

#[test]
fn conversations_that_nobody_has_to_come_for_are_not_counted() {
    let mut w = worker(config());
    for (name, lease_id) in [("expires", 1), ("read", 2), ("released", 3), ("dropped", 4)] {
        grants(&mut w, 0, Grant { history: true, ..grant(name, lease_id) });
    }
    let message = |name: &str, lease_id, release| {
        let (request, reader, readers) = (request(name), reader(1), 1);
        match release {
            true => PeerMessage::Release { request, lease_id, reader, readers },
            false => PeerMessage::Done { request, lease_id, reader, readers, serial: lease_id, more: false },
        }
    };
    w.handle_message(Time(1), &from(), message("read", 2, false));
    w.handle_message(Time(1), &from(), message("released", 3, true));
    assert_eq!(w.leases(), 2);
    w.handle_timeout(Time(2_000 * MS));
    assert_eq!(w.leases(), 0);
    let mut stats = Stats::default();
    while let Some(report) = w.poll_report() {
        stats.merge(&report.stats);
    }
    assert_eq!((stats.sends_granted, stats.sends_read, stats.sends_released, stats.sends_expired), (0, 0, 0, 0));
}
