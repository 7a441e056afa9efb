//! One engine on two hosts: the ranks of the producer run in two network namespaces with addresses of their own, its
//! scheduler side on the first; the consumer in a third knows the head's address only. Every byte from both ranks.

use crate::common::cache::{CacheSpec, Loaded};
use crate::common::child::{Ask, Child, Lists, Tell};
use crate::common::engine::{lists, ranks, scheduler_config, worker_config};
use crate::common::netns::Hosts;
use crate::common::skip::skip;
use kvferry::connector::{Scheduler, SchedulerConfig, Transport, WorkerConfig};
use kvferry::proto::geometry::GroupKind;
use kvferry::proto::ids::RankId;
use kvferry::proto::shape::GroupSpec;
use kvferry::proto::wire::{Cause, TransferParams, WorkerReport};

/// Worker processes of an engine, one per (rank, host).
fn workers(hosts: &Hosts, places: &[usize], engine: &str, cache: &CacheSpec) -> Vec<Child> {
    workers_with(hosts, places, engine, cache, |_| ())
}

fn workers_with(
    hosts: &Hosts,
    places: &[usize],
    engine: &str,
    cache: &CacheSpec,
    change: impl Fn(&mut WorkerConfig),
) -> Vec<Child> {
    let mut children: Vec<Child> = ranks(cache)
        .into_iter()
        .zip(places)
        .map(|(rank, host)| Child::start(rank, Some(hosts.netns(*host)), &[]))
        .collect();
    for child in &mut children {
        let mut config = Box::new(worker_config(engine, child.rank, cache, Transport::Tcp));
        change(&mut config);
        child.send(&Ask::StartWorker { config, cache: Some(cache.clone()) });
    }
    children
}

fn metadata(children: &mut [Child]) -> Vec<(RankId, Vec<u8>)> {
    let one = |c: &mut Child| match c.receive() {
        Tell::Bytes(bytes) => (c.rank, bytes),
        other => panic!("{other:?}"),
    };
    children.iter_mut().map(one).collect()
}

fn report(child: &mut Child, mut enough: impl FnMut(&WorkerReport) -> bool) {
    let start = std::time::Instant::now();
    loop {
        if let Some(report) = child.report(1_000)
            && enough(&report)
        {
            return;
        }
        assert!(start.elapsed() < crate::common::child::LONG, "rank {} does not report", child.rank);
    }
}

fn two_hosts_and_a_consumer(ipv6: bool, tp: u32, pp: u32) {
    let hosts = match Hosts::new(3, ipv6) {
        Ok(hosts) => hosts,
        Err(why) => return skip("netns", &why),
    };
    let p_cache = CacheSpec::small(tp, pp, 50);
    let mut d_cache = CacheSpec::small(tp, pp, 51);
    (d_cache.engine.num_blocks, d_cache.engine.gap) = (50, 8);
    let mut p = workers(&hosts, &[0, 1], "prefill", &p_cache);
    let mut d = workers(&hosts, &[2, 2], "decode", &d_cache);

    // The head: no host is configured, so that it has to find the address that the others can reach.
    let mut head = Child::start(RankId { pp: 0, tp: 0 }, Some(hosts.netns(0)), &[]);
    let config = SchedulerConfig { host: None, ..scheduler_config("prefill", &p_cache) };
    head.ok(&Ask::StartScheduler { config: Box::new(config) });
    let ranks = metadata(&mut p);
    let Tell::Address(host, port) = head.ok(&Ask::Serve { ranks }) else { panic!("no address") };
    assert_eq!(host, hosts.addresses[0]);
    metadata(&mut d);

    let (there, here): (Lists, Lists) = (lists(1, 12, true), lists(20, 12, false));
    for child in &mut p {
        child.ok(&Ask::Fill { request: "p".into(), blocks: there.clone() });
    }
    let params = TransferParams { do_remote_decode: true, ..TransferParams::default() };
    let finished = Ask::Finished { request: "p".into(), params, blocks: there, tokens: 48 };
    let Tell::Params(Some(params)) = head.ok(&finished) else { panic!("no params") };
    assert_eq!(params.remote_host.as_deref(), Some(hosts.addresses[0].as_str()));
    assert_eq!(params.remote_port, Some(i64::from(port)));
    let step = head.bytes(&Ask::Step);
    for child in &mut p {
        child.ok(&Ask::Submit { step: step.clone() });
    }

    // The consumer's scheduler side needs no network.
    let scheduler = Scheduler::start(scheduler_config("decode", &d_cache)).unwrap();
    scheduler.allocated("d", &params, crate::common::engine::blocks(&here), 48, 48).unwrap();
    let step = scheduler.step().unwrap();
    for child in &mut d {
        child.ok(&Ask::Submit { step: step.clone() });
    }
    for child in &mut d {
        report(child, |r| {
            assert!(r.failed_recving.is_empty(), "{r:#?}");
            r.finished_recving.iter().any(|r| r.as_str() == "d")
        });
    }
    for child in &mut p {
        report(child, |r| r.finished_sending.iter().any(|r| r.as_str() == "p"));
    }
    for child in &mut d {
        child.check(&[Loaded::whole("p", &here)]);
    }

    // The second host dies: the rank that reads from it fails, the other does not.
    p[1].signal(rustix::process::Signal::STOP);
    let again = Ask::Finished {
        request: "p2".into(),
        params: TransferParams { do_remote_decode: true, ..TransferParams::default() },
        blocks: lists(1, 12, true),
        tokens: 48,
    };
    let Tell::Params(Some(params)) = head.ok(&again) else { panic!("no params") };
    let step = head.bytes(&Ask::Step);
    p[0].ok(&Ask::Submit { step });
    scheduler.allocated("d2", &params, crate::common::engine::blocks(&here), 48, 48).unwrap();
    let step = scheduler.step().unwrap();
    for child in &mut d {
        child.ok(&Ask::Submit { step: step.clone() });
    }
    report(&mut d[0], |r| {
        assert!(r.failed_recving.is_empty(), "{r:#?}");
        r.finished_recving.iter().any(|r| r.as_str() == "d2")
    });
    p[1].kill();
    report(&mut d[1], |r| {
        let failure = r.failed_recving.iter().find(|f| f.request.as_str() == "d2");
        failure.is_some_and(|f| {
            assert_eq!(f.cause, Cause::PeerDied, "{}", f.message);
            true
        })
    });
}

#[test]
fn two_tensor_ranks_on_two_hosts() {
    two_hosts_and_a_consumer(false, 2, 1);
}

#[test]
fn two_pipeline_ranks_on_two_hosts_over_ipv6() {
    two_hosts_and_a_consumer(true, 1, 2);
}

/// A producer whose listener answers and whose data ports do not: what is sent there vanishes, as behind a firewall that
/// drops. Its request ends at the handshake's time-out, and meanwhile the consumer's reads from another producer go on.
#[test]
fn an_engine_behind_a_firewall_fails_alone() {
    let hosts = match Hosts::new(3, false) {
        Ok(hosts) => hosts,
        Err(why) => return skip("netns", &why),
    };
    let cache = CacheSpec::small(1, 1, 60);
    let mut d_cache = CacheSpec::small(1, 1, 61);
    (d_cache.engine.num_blocks, d_cache.engine.gap) = (50, 8);
    let (mut open, mut shut) = (workers(&hosts, &[0], "open", &cache), workers(&hosts, &[1], "shut", &cache));
    // Both engines' listeners are on the first host. Only the worker of the second one is where nothing arrives.
    let mut heads = [0, 0].map(|host| Child::start(RankId { pp: 0, tp: 0 }, Some(hosts.netns(host)), &[]));
    for (head, (engine, workers)) in heads.iter_mut().zip([("open", &mut open), ("shut", &mut shut)]) {
        let config = SchedulerConfig { host: None, ..scheduler_config(engine, &cache) };
        head.ok(&Ask::StartScheduler { config: Box::new(config) });
        let Tell::Address(..) = head.ok(&Ask::Serve { ranks: metadata(workers) }) else { panic!("no address") };
    }
    hosts.swallow(2, &hosts.addresses[1]);
    let mut d = Child::start(RankId { pp: 0, tp: 0 }, Some(hosts.netns(2)), &[]);
    let mut config = worker_config("decode", d.rank, &d_cache, Transport::Tcp);
    config.machine.handshake_timeout_ms = 20_000;
    d.bytes(&Ask::StartWorker { config: Box::new(config), cache: Some(d_cache.clone()) });
    let scheduler = Scheduler::start(scheduler_config("decode", &d_cache)).unwrap();

    let (there, here): (Lists, Lists) = (lists(1, 12, true), lists(20, 12, false));
    let mut load = |d: &mut Child, from: usize, request: &str| {
        let asked = TransferParams { do_remote_decode: true, ..TransferParams::default() };
        let finished = Ask::Finished { request: request.into(), params: asked, blocks: there.clone(), tokens: 48 };
        let Tell::Params(Some(params)) = heads[from].ok(&finished) else { panic!("no params") };
        let worker = if from == 0 { &mut open[0] } else { &mut shut[0] };
        worker.ok(&Ask::Fill { request: request.into(), blocks: there.clone() });
        worker.ok(&Ask::Submit { step: heads[from].bytes(&Ask::Step) });
        scheduler.allocated(request, &params, crate::common::engine::blocks(&here), 48, 48).unwrap();
        d.ok(&Ask::Submit { step: scheduler.step().unwrap() });
    };
    load(&mut d, 1, "lost");
    let mut loaded = 0;
    let mut failure = None;
    while failure.is_none() {
        let request = format!("good {loaded}");
        load(&mut d, 0, &request);
        report(&mut d, |r| {
            failure =
                failure.take().or_else(|| r.failed_recving.iter().find(|f| f.request.as_str() == "lost").cloned());
            let others: Vec<_> = r.failed_recving.iter().filter(|f| f.request.as_str() != "lost").collect();
            assert!(others.is_empty(), "{others:#?}");
            r.finished_recving.iter().any(|r| r.as_str() == request)
        });
        d.check(&[Loaded::whole(&request, &here)]);
        loaded += u32::from(failure.is_none());
    }
    let failure = failure.unwrap();
    assert_eq!(failure.cause, Cause::HandshakeFailed, "{}", failure.message);
    assert!(loaded >= 1, "only {loaded} requests were loaded from the other engine meanwhile: {}", failure.message);
}

/// Two hosts with two addresses each and an IPv6 one: the producer is read from by all of them, whichever it advertises,
/// and by loopback from its own host. An address that nobody listens on, or that nobody has, fails soon and says what to do.
#[test]
fn two_hosts_with_two_addresses_each() {
    let hosts = match Hosts::new(2, false) {
        Ok(hosts) => hosts,
        Err(why) => return skip("netns", &why),
    };
    for (host, last) in [(0, 1), (1, 2)] {
        hosts.add_address(host, &format!("10.78.0.{last}/24")).unwrap();
        hosts.add_address(host, &format!("fd78::{last}/64")).unwrap();
    }
    let cache = CacheSpec::small(1, 1, 60);
    let mut p = workers(&hosts, &[0], "prefill", &cache);
    let mut head = Child::start(RankId { pp: 0, tp: 0 }, Some(hosts.netns(0)), &[]);
    let config = SchedulerConfig { host: None, ..scheduler_config("prefill", &cache) };
    head.ok(&Ask::StartScheduler { config: Box::new(config) });
    let ranks = metadata(&mut p);
    let Tell::Address(advertised, port) = head.ok(&Ask::Serve { ranks }) else { panic!("no address") };
    assert_eq!(advertised, hosts.addresses[0]);

    let listening = port;
    let asked = [
        ("10.77.0.1", port, 1),
        ("10.78.0.1", port, 1),
        ("fd78::1", port, 1),
        ("127.0.0.1", port, 0),
        ("::1", port, 0),
        ("localhost", port, 0),
        // Nobody listens there, and nobody has that address.
        ("10.78.0.1", port - 1, 1),
        ("10.78.0.99", port, 1),
    ];
    for (index, (host, port, from)) in asked.into_iter().enumerate() {
        let name = format!("p{index}");
        let (there, here): (Lists, Lists) = (lists(1 + 3 * index as u32, 3, false), lists(20, 3, false));
        p[0].ok(&Ask::Fill { request: name.clone(), blocks: there.clone() });
        let params = TransferParams { do_remote_decode: true, ..TransferParams::default() };
        let finished = Ask::Finished { request: name.clone(), params, blocks: there, tokens: 12 };
        let Tell::Params(Some(params)) = head.ok(&finished) else { panic!("no params") };
        let step = head.bytes(&Ask::Step);
        p[0].ok(&Ask::Submit { step });

        // What a proxy makes of it.
        let params =
            TransferParams { remote_host: Some(host.into()), remote_port: Some(i64::from(port)), ..(*params).clone() };
        let engine = format!("decode-{index}");
        let patient = |config: &mut WorkerConfig| config.machine.handshake_timeout_ms = 120_000;
        let mut d = workers_with(&hosts, &[from], &engine, &CacheSpec { seed: 61, ..cache.clone() }, patient);
        metadata(&mut d);
        let scheduler = Scheduler::start(scheduler_config(&engine, &cache)).unwrap();
        scheduler.allocated("d", &params, crate::common::engine::blocks(&here), 12, 12).unwrap();
        let begin = std::time::Instant::now();
        d[0].ok(&Ask::Submit { step: scheduler.step().unwrap() });
        report(&mut d[0], |r| {
            if index >= asked.len() - 2 {
                let failure = r.failed_recving.iter().find(|f| f.request.as_str() == "d");
                return failure.is_some_and(|f| {
                    assert_eq!(f.cause, Cause::HandshakeFailed);
                    let seen = if port == listening { "cannot be reached" } else { "refused" };
                    for part in [&format!("{host}:{port}"), seen, "check"] {
                        assert!(f.message.contains(part), "{}", f.message);
                    }
                    // Far from the handshake's own time on a busy machine too.
                    assert!(begin.elapsed().as_secs() < 60, "{:?}", begin.elapsed());
                    true
                });
            }
            assert!(r.failed_recving.is_empty(), "by {host}: {:#?}", r.failed_recving);
            r.finished_recving.iter().any(|r| r.as_str() == "d")
        });
        if index < asked.len() - 2 {
            d[0].check(&[Loaded::whole(&name, &here)]);
        }
    }
}

/// While bytes come slowly, over a link or from a peer that is busy, neither side's progress thread takes a processor from
/// engines that compute: it is woken when there are some, not for each packet, and does not look for them in between.
#[test]
fn a_slow_link_leaves_processors_to_others() {
    let hosts = match Hosts::new(2, false) {
        Ok(hosts) => hosts,
        Err(why) => return skip("netns", &why),
    };
    let mut cache = CacheSpec::small(1, 1, 70);
    // 64 KiB a token.
    cache.model.groups = vec![GroupSpec::attention(GroupKind::Full, 0..8, 8, 512, 512)];
    cache.engine.block_size = vec![4];
    let mut p = workers(&hosts, &[0], "prefill", &cache);
    let mut d = Child::start(RankId { pp: 0, tp: 0 }, Some(hosts.netns(1)), &[]);
    let config = worker_config("decode", d.rank, &cache, Transport::Tcp);
    d.bytes(&Ask::StartWorker { config: Box::new(config), cache: Some(CacheSpec { seed: 71, ..cache.clone() }) });
    let mut head = Child::start(RankId { pp: 0, tp: 0 }, Some(hosts.netns(0)), &[]);
    let config = SchedulerConfig { host: None, ..scheduler_config("prefill", &cache) };
    head.ok(&Ask::StartScheduler { config: Box::new(config) });
    let Tell::Address(..) = head.ok(&Ask::Serve { ranks: metadata(&mut p) }) else { panic!("no address") };
    let scheduler = Scheduler::start(scheduler_config("decode", &cache)).unwrap();
    let blocks = |first: u32| -> Lists { vec![(first..first + 12).collect()] };
    let mut loaded = vec![];
    let mut load = |request: &str, there: Lists, here: Lists| {
        p[0].ok(&Ask::Fill { request: request.into(), blocks: there.clone() });
        let params = TransferParams { do_remote_decode: true, ..TransferParams::default() };
        let finished = Ask::Finished { request: request.into(), params, blocks: there, tokens: 48 };
        let Tell::Params(Some(params)) = head.ok(&finished) else { panic!("no params") };
        p[0].ok(&Ask::Submit { step: head.bytes(&Ask::Step) });
        scheduler.allocated(request, &params, crate::common::engine::blocks(&here), 48, 48).unwrap();
        let turns = |child: &mut Child| match child.ok(&Ask::Stats) {
            Tell::Stats { turns, .. } => turns,
            other => panic!("{other:?}"),
        };
        let before = [turns(&mut p[0]), turns(&mut d)];
        d.ok(&Ask::Submit { step: scheduler.step().unwrap() });
        report(&mut d, |r| {
            assert!(r.failed_recving.is_empty(), "{r:#?}");
            r.finished_recving.iter().any(|r| r.as_str() == request)
        });
        loaded.push(Loaded::whole(request, &here));
        d.check(&loaded);
        [turns(&mut p[0]) - before[0], turns(&mut d) - before[1]]
    };
    // While the connection is made.
    load("first", blocks(1), blocks(20));
    if let Err(why) = hosts.slow(0, 5_000_000) {
        return skip("netns", &why);
    }
    let turns = load("slow", blocks(14), blocks(6));
    // 3 MiB take some 600 ms: over 100,000 turns of a thread that spins.
    assert!(turns.iter().all(|turns| *turns < 20_000), "turns of the progress threads of P and D: {turns:?}");
}
