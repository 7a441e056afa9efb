//! Engines with a key: every byte arrives, who has another key fails with a cause that says so, and the wire shows
//! neither memory keys nor addresses nor names.

use std::path::PathBuf;

use crate::common::cache::{CacheSpec, Loaded};
use crate::common::child::{Ask, Child, Tell};
use crate::common::engine::{Engine, lists, scheduler_config, worker_config};
use crate::common::keys;
use crate::common::netns::Hosts;
use crate::common::skip::skip;
use crate::common::wire::Capture;
use kvferry::connector::{Scheduler, SchedulerConfig, Transport, WorkerConfig};
use kvferry::proto::ids::RankId;
use kvferry::proto::wire::{Cause, Message, RankMetadata, TransferParams};

/// A key file; for byte 0 the empty path, which means no key.
fn key_file(byte: u8) -> Option<PathBuf> {
    Some(if byte == 0 { PathBuf::new() } else { keys::key_file(byte) })
}

fn engine(name: &str, cache: &CacheSpec, transport: Transport, key: u8) -> Engine {
    let for_worker =
        |w: &mut WorkerConfig| (w.agent.key_file, w.machine.handshake_timeout_ms) = (key_file(key), 60_000);
    Engine::start_with(name, cache, transport, for_worker, |s| s.key_file = key_file(key))
}

/// A hand-over that must work, every byte of it.
fn works(p: &mut Engine, d: &mut Engine, name: &str) {
    let (there, here) = (lists(25, 3, true), lists(29, 3, false));
    let params = p.prefill(name, &there, 12);
    d.load(name, &params, &here, 12);
    let said = d.await_received(name);
    assert!(said.failures.is_empty(), "{said:#?}");
    p.await_sent(name);
    d.check(&[(name, &here)]);
}

#[test]
fn engines_with_one_key_hand_over_and_others_fail_by_name() {
    for transport in [Transport::Tcp, Transport::Shm] {
        let cache = CacheSpec::small(2, 1, 60);
        let mut p = engine("prefill", &cache, transport, 1);
        let mut d = engine("decode", &CacheSpec { seed: 61, ..cache.clone() }, transport, 1);
        works(&mut p, &mut d, "first");
        let here = lists(1, 3, false);
        for (other, key, text) in [("stranger", 2, "different keys"), ("open", 0, "key_file")] {
            let mut bad = engine(other, &CacheSpec { seed: 62, ..cache.clone() }, transport, key);
            let params = p.prefill(other, &lists(5, 3, false), 12);
            bad.load(other, &params, &here, 12);
            let said = bad.await_received(other);
            assert_eq!(said.failures.len(), 2);
            for failure in said.failures.values() {
                assert_eq!(failure.cause, Cause::HandshakeFailed, "{}", failure.message);
                assert!(failure.message.contains(text), "{}", failure.message);
            }
            // Not a byte has changed.
            bad.check(&[]);
        }
        // A consumer with a key takes nothing from a producer without one.
        let mut open = engine("open-prefill", &cache, transport, 0);
        let params = open.prefill("downgrade", &lists(5, 3, false), 12);
        d.load("downgrade", &params, &here, 12);
        let said = d.await_received("downgrade");
        assert!(said.failures.values().all(|f| f.cause == Cause::HandshakeFailed), "{said:#?}");
        assert!(said.failures.values().all(|f| f.message.contains("has no key")), "{said:#?}");
        let (there, here) = (lists(5, 3, true), lists(9, 3, false));
        let params = p.prefill("last", &there, 12);
        d.load("last", &params, &here, 12);
        assert!(d.await_received("last").failures.is_empty());
        d.check(&[("first", &lists(29, 3, false)), ("last", &here)]);
    }
}

#[test]
fn ranks_push_their_metadata_with_the_key_only() {
    let cache = CacheSpec::small(1, 1, 63);
    let config = SchedulerConfig { push: true, key_file: key_file(1), ..scheduler_config("prefill", &cache) };
    let scheduler = Scheduler::start(config).unwrap();
    let (host, port) = scheduler.address().unwrap();
    for (key, text) in [(2, Some("different keys")), (0, Some("key_file")), (1, None)] {
        let rank = RankId { pp: 0, tp: 0 };
        let mut child = Child::start(rank, None, &[]);
        let mut config = worker_config("prefill", rank, &cache, Transport::Tcp);
        config.agent.key_file = key_file(key);
        child.bytes(&Ask::StartWorker { config: Box::new(config), cache: Some(cache.clone()) });
        match (child.ask(&Ask::Push { host: host.clone(), port, expected: 1, ms: 30_000 }), text) {
            (Tell::Error { message, .. }, Some(text)) => assert!(message.contains(text), "{message}"),
            (Tell::Count(0), None) => {}
            other => panic!("key {key}: {other:?}"),
        }
    }
}

/// What of an engine's metadata nobody else should see, by name.
fn secrets(who: &str, metadata: &[u8]) -> Vec<(String, Vec<u8>)> {
    let metadata = RankMetadata::from_bytes(metadata).unwrap();
    // UCX's own bytes, without the envelope of 12 bytes before and 8 after them.
    let inner = |envelope: &[u8]| envelope[12..envelope.len() - 8].to_vec();
    let mut secrets = vec![
        (format!("{who}: worker address"), inner(&metadata.agent.address)),
        (format!("{who}: agent's name"), metadata.agent.name.clone().into_bytes()),
        (format!("{who}: engine"), metadata.engine.as_str().as_bytes().to_vec()),
    ];
    for (index, region) in metadata.agent.regions.iter().enumerate() {
        secrets.push((format!("{who}: rkey {index}"), inner(&region.rkey)));
        secrets.push((format!("{who}: base {index}"), region.base.to_be_bytes().to_vec()));
        secrets.push((format!("{who}: base {index}, little-endian"), region.base.to_le_bytes().to_vec()));
    }
    secrets
}

/// Which of the secrets a hand-over between two hosts shows to who listens between them.
fn seen_on_the_wire(hosts: &Hosts, key: u8) -> Vec<(String, bool)> {
    let cache = CacheSpec::small(1, 1, 64);
    let d_cache = CacheSpec { seed: 65, ..cache.clone() };
    let rank = RankId { pp: 0, tp: 0 };
    let capture = Capture::start(hosts);
    let worker = |engine: &str, host: usize, cache: &CacheSpec| {
        let mut child = Child::start(rank, Some(hosts.netns(host)), &[]);
        let mut config = worker_config(engine, rank, cache, Transport::Tcp);
        config.agent.key_file = key_file(key);
        let metadata = child.bytes(&Ask::StartWorker { config: Box::new(config), cache: Some(cache.clone()) });
        (child, metadata)
    };
    let (mut p, of_p) = worker("the-prefill-engine", 0, &cache);
    let (mut d, of_d) = worker("the-decode-engine", 1, &d_cache);
    let mut head = Child::start(rank, Some(hosts.netns(0)), &[]);
    let config =
        SchedulerConfig { host: None, key_file: key_file(key), ..scheduler_config("the-prefill-engine", &cache) };
    head.ok(&Ask::StartScheduler { config: Box::new(config) });
    head.ok(&Ask::Serve { ranks: vec![(rank, of_p.clone())] });

    let (there, here) = (lists(1, 12, true), lists(20, 12, false));
    p.ok(&Ask::Fill { request: "the-request".into(), blocks: there.clone() });
    let params = TransferParams { do_remote_decode: true, ..TransferParams::default() };
    let finished = Ask::Finished { request: "the-request".into(), params, blocks: there, tokens: 48 };
    let Tell::Params(Some(params)) = head.ok(&finished) else { panic!("no params") };
    let step = head.bytes(&Ask::Step);
    p.ok(&Ask::Submit { step });
    let scheduler = Scheduler::start(scheduler_config("the-decode-engine", &d_cache)).unwrap();
    scheduler.allocated("d", &params, crate::common::engine::blocks(&here), 48, 48).unwrap();
    d.ok(&Ask::Submit { step: scheduler.step().unwrap() });
    let start = std::time::Instant::now();
    while !d.report(1000).is_some_and(|r| {
        assert!(r.failed_recving.is_empty(), "{r:#?}");
        !r.finished_recving.is_empty()
    }) {
        assert!(start.elapsed() < crate::common::child::LONG, "no report");
    }
    d.check(&[Loaded::whole("the-request", &here)]);
    d.ok(&Ask::ShutDownWorker);
    p.ok(&Ask::ShutDownWorker);
    let wire = capture.streams();
    assert!(wire.len() > 10_000, "{} bytes were captured", wire.len());
    let mut all = secrets("prefill", &of_p);
    // D's metadata stays with D; what P learns of it is in its hello and its messages.
    all.extend(
        secrets("decode", &of_d).into_iter().filter(|(name, _)| !name.contains("rkey") && !name.contains("base")),
    );
    all.push(("layer".into(), b"layer".to_vec()));
    all.push(("request".into(), b"the-request".to_vec()));
    all.into_iter().map(|(name, bytes)| (name, wire.windows(bytes.len()).any(|at| at == bytes))).collect()
}

#[test]
fn the_wire_shows_nothing_with_a_key_and_all_of_it_without() {
    let hosts = match Hosts::new(2, false) {
        Ok(hosts) => hosts,
        Err(why) => return skip("netns", &why),
    };
    let clear = seen_on_the_wire(&hosts, 0);
    println!("without a key: {clear:?}");
    for (name, seen) in &clear {
        assert!(*seen || name.contains("little-endian"), "{name} was not on the wire without a key");
    }
    let sealed = seen_on_the_wire(&hosts, 1);
    for (name, seen) in &sealed {
        assert!(!seen, "{name} was on the wire with a key");
    }
    assert_eq!(clear.len(), sealed.len());
}
