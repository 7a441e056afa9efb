//! An engine as a host would run it: worker processes, a scheduler side, and the steps between them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use kvferry::connector::{Scheduler, SchedulerConfig, Transport, WorkerConfig};
use kvferry::proto::aggregate::Outcome;
use kvferry::proto::ids::{EngineId, RankId, RequestId};
use kvferry::proto::scheduler::FinishOutcome;
use kvferry::proto::stats::Stats;
use kvferry::proto::wire::{
    Blocks, CompatField, Load, Message, RecvFailure, StepMetadata, TransferParams, WorkerReport,
};

use super::cache::{CacheSpec, Loaded};
use super::child::{Ask, Child, LONG, Lists, Tell};

pub fn id(name: &str) -> EngineId {
    EngineId::new(name).unwrap()
}

pub fn request(name: &str) -> RequestId {
    RequestId::new(name).unwrap()
}

pub fn blocks(lists: &[Vec<u32>]) -> Vec<Blocks> {
    lists.iter().map(|list| Blocks::from(list.as_slice())).collect()
}

/// The configuration of one rank of an engine with such caches.
pub fn worker_config(engine: &str, rank: RankId, cache: &CacheSpec, transport: Transport) -> WorkerConfig {
    let mut config = WorkerConfig {
        pp_rank: rank.pp,
        tp_rank: rank.tp,
        tp_size: cache.engine.tp,
        pp_size: cache.engine.pp,
        dcp_size: cache.engine.dcp,
        compat: [("model", "tiny"), ("dtype", "bfloat16")]
            .map(|(name, value)| CompatField { name: name.into(), value: value.into(), informative: false })
            .into(),
        ..WorkerConfig::new(id(engine))
    };
    config.agent.transport = transport;
    config
}

pub fn scheduler_config(engine: &str, cache: &CacheSpec) -> SchedulerConfig {
    SchedulerConfig {
        tp_size: cache.engine.tp,
        pp_size: cache.engine.pp,
        dcp_size: cache.engine.dcp,
        host: Some("127.0.0.1".into()),
        port: 0,
        ..SchedulerConfig::new(id(engine), cache.groups())
    }
}

pub fn ranks(cache: &CacheSpec) -> Vec<RankId> {
    (0..cache.engine.pp).flat_map(|pp| (0..cache.engine.tp).map(move |tp| RankId { pp, tp })).collect()
}

/// What a rank said about one request.
#[derive(Debug, Clone, Default)]
pub struct Said {
    pub granted: BTreeSet<RankId>,
    pub sent: BTreeSet<RankId>,
    pub received: BTreeSet<RankId>,
    pub failures: BTreeMap<RankId, RecvFailure>,
}

pub struct Engine {
    pub name: String,
    pub cache: CacheSpec,
    pub scheduler: Scheduler,
    pub workers: Vec<Child>,
    pub said: BTreeMap<String, Said>,
    /// Every report, as it came.
    pub reports: Vec<WorkerReport>,
    pub stats: Stats,
    pub address: Option<(String, u16)>,
}

impl Engine {
    /// Starts workers and scheduler side and serves the metadata.
    pub fn start(name: &str, cache: &CacheSpec, transport: Transport) -> Engine {
        Self::start_with(name, cache, transport, |_| {}, |_| {})
    }

    pub fn start_with(
        name: &str,
        cache: &CacheSpec,
        transport: Transport,
        change_worker: impl Fn(&mut WorkerConfig),
        change_scheduler: impl Fn(&mut SchedulerConfig),
    ) -> Engine {
        let mut engine = Self::start_cold(name, cache, transport, change_worker, change_scheduler);
        let metadata = engine.complete();
        engine.address = Some(engine.scheduler.serve(metadata).unwrap());
        engine
    }

    /// Starts workers without caches, and the scheduler side without their metadata.
    pub fn start_cold(
        name: &str,
        cache: &CacheSpec,
        transport: Transport,
        change_worker: impl Fn(&mut WorkerConfig),
        change_scheduler: impl Fn(&mut SchedulerConfig),
    ) -> Engine {
        let mut workers: Vec<Child> = ranks(cache).into_iter().map(|rank| Child::start(rank, None, &[])).collect();
        for worker in &mut workers {
            let mut config = worker_config(name, worker.rank, cache, transport);
            change_worker(&mut config);
            worker.send(&Ask::StartWorker { config: Box::new(config), cache: None });
        }
        for worker in &mut workers {
            assert_eq!(worker.receive(), Tell::Ok);
        }
        let mut config = scheduler_config(name, cache);
        change_scheduler(&mut config);
        let scheduler = Scheduler::start(config).unwrap();
        Engine {
            name: name.into(),
            cache: cache.clone(),
            scheduler,
            workers,
            said: BTreeMap::new(),
            reports: Vec::new(),
            stats: Stats::default(),
            address: None,
        }
    }

    /// Gives every worker its cache; their metadata.
    pub fn complete(&mut self) -> Vec<(RankId, Vec<u8>)> {
        let told = self.ask_all(&Ask::Complete { cache: self.cache.clone() });
        let told = self.workers.iter().map(|worker| worker.rank).zip(told);
        told.map(|(rank, told)| match told {
            Tell::Bytes(metadata) => (rank, metadata),
            other => panic!("{other:?}"),
        })
        .collect()
    }

    /// Asks every worker, all at the same time, for something that has to succeed.
    fn ask_all(&mut self, ask: &Ask) -> Vec<Tell> {
        self.workers.iter_mut().for_each(|worker| worker.send(ask));
        self.workers.iter_mut().map(Child::received).collect()
    }

    /// One step of the engine: the scheduler side's work goes to every worker.
    pub fn step(&mut self) {
        let step = self.scheduler.step().unwrap();
        self.ask_all(&Ask::Submit { step });
    }

    /// Collects reports until `enough`, and passes them to the scheduler side.
    pub fn until(&mut self, what: &str, enough: impl Fn(&Engine) -> bool) {
        let start = Instant::now();
        while !enough(self) {
            assert!(start.elapsed() < LONG, "{}: waiting for {what}; so far {:#?}", self.name, self.said);
            for told in self.ask_all(&Ask::Report { ms: 5 }) {
                match told {
                    Tell::Report(report) => report.into_iter().for_each(|bytes| self.take(&bytes)),
                    other => panic!("{other:?}"),
                }
            }
        }
    }

    fn take(&mut self, report: &[u8]) {
        let report = WorkerReport::from_bytes(report).unwrap();
        let all = self.workers.len();
        self.stats.merge(&report.stats);
        // The counters say what the report does.
        let mut failures = BTreeMap::new();
        report.failed_recving.iter().for_each(|failure| *failures.entry(failure.cause).or_default() += 1);
        assert_eq!(report.stats.recv_failures, failures, "{report:#?}");
        assert_eq!(report.stats.recvs as usize, report.finished_recving.len() - report.failed_recving.len());
        let outcome = self.scheduler.on_report(&report.clone().into()).unwrap();
        let mut whole = Outcome::default();
        for request in &report.granted {
            let said = self.said.entry(request.to_string()).or_default();
            assert!(said.granted.insert(report.rank), "{request} was granted twice by rank {}", report.rank);
            if said.granted.len() == all {
                whole.granted.push(request.clone());
            }
        }
        for request in &report.finished_sending {
            let said = self.said.entry(request.to_string()).or_default();
            assert!(said.sent.insert(report.rank), "{request} was sent twice by rank {}", report.rank);
            if said.sent.len() == all {
                whole.finished_sending.push(request.clone());
            }
        }
        for request in &report.finished_recving {
            let said = self.said.entry(request.to_string()).or_default();
            assert!(said.received.insert(report.rank), "{request} was received twice by rank {}", report.rank);
            if said.received.len() == all {
                whole.finished_recving.push(request.clone());
            }
        }
        for failure in &report.failed_recving {
            assert!(report.finished_recving.contains(&failure.request), "a failed receive is a finished one");
            let said = self.said.entry(failure.request.to_string()).or_default();
            said.failures.insert(report.rank, failure.clone());
        }
        // The scheduler side counts as this does.
        let sorted = |mut list: Vec<RequestId>| {
            list.sort_unstable();
            list
        };
        assert_eq!(sorted(outcome.granted), sorted(whole.granted));
        assert_eq!(sorted(outcome.finished_sending), sorted(whole.finished_sending));
        assert_eq!(sorted(outcome.finished_recving), sorted(whole.finished_recving));
        self.reports.push(report);
    }

    pub fn said(&self, request: &str) -> Said {
        self.said.get(request).cloned().unwrap_or_default()
    }

    /// Waits until every rank has said that the receive is over.
    pub fn await_received(&mut self, request: &str) -> Said {
        self.until(&format!("the receive of {request}"), |e| e.said(request).received.len() == e.workers.len());
        self.said(request)
    }

    /// Waits until every rank has said that the send is over.
    pub fn await_sent(&mut self, request: &str) {
        self.until(&format!("the send of {request}"), |e| e.said(request).sent.len() == e.workers.len());
    }

    /// A finished prefill: fills the blocks on every rank and grants the lease. Returns the decoder's params.
    pub fn prefill(&mut self, request: &str, lists: &Lists, tokens: u64) -> TransferParams {
        self.ask_all(&Ask::Fill { request: request.into(), blocks: lists.clone() });
        self.finish_prefill(request, lists, tokens)
    }

    /// As `prefill`, with the blocks as they are.
    pub fn finish_prefill(&mut self, request: &str, lists: &Lists, tokens: u64) -> TransferParams {
        let params = self.finished(request, lists, tokens);
        self.step();
        params
    }

    /// As `prefill`, with a lease that is meant to run out. The engine's others last for longer than a busy machine takes.
    pub fn prefill_for(&mut self, request: &str, lists: &Lists, tokens: u64, lease_ms: u64) -> TransferParams {
        self.ask_all(&Ask::Fill { request: request.into(), blocks: lists.clone() });
        let params = self.finished(request, lists, tokens);
        let mut step = StepMetadata::from_bytes(&self.scheduler.step().unwrap()).unwrap();
        for grant in step.grants.iter_mut().filter(|grant| grant.request.as_str() == request) {
            grant.lease_ms = lease_ms;
        }
        self.ask_all(&Ask::Submit { step: step.to_bytes().unwrap() });
        TransferParams { remote_lease_ms: Some(lease_ms as i64), ..params }
    }

    fn finished(&mut self, request: &str, lists: &Lists, tokens: u64) -> TransferParams {
        let asked = TransferParams { do_remote_decode: true, ..TransferParams::default() };
        let finish = self.scheduler.finished(request, &asked, FinishOutcome::Complete, blocks(lists), tokens).unwrap();
        assert!(finish.keep);
        finish.params.unwrap()
    }

    /// What a proxy gives the decoder that asks both engines at once for the request `transfer_id`.
    pub fn announce(&self, transfer_id: &str) -> TransferParams {
        let (host, port) = self.scheduler.address().unwrap();
        TransferParams {
            do_remote_prefill: true,
            transfer_id: Some(transfer_id.into()),
            remote_engine_id: Some(self.name.clone()),
            remote_host: Some(host),
            remote_port: Some(port.into()),
            ..TransferParams::default()
        }
    }

    /// As `prefill`, of a request that was announced; the engine has its own name for it.
    pub fn complete_announced(&mut self, request: &str, transfer_id: &str, lists: &Lists, tokens: u64) {
        self.ask_all(&Ask::Fill { request: request.into(), blocks: lists.clone() });
        let transfer_id = Some(transfer_id.to_owned());
        let asked = TransferParams { do_remote_decode: true, transfer_id, ..TransferParams::default() };
        let finish = self.scheduler.finished(request, &asked, FinishOutcome::Complete, blocks(lists), tokens).unwrap();
        assert!(finish.keep);
        self.step();
        let all = self.workers.len();
        self.until(&format!("the grant of {request}"), |e| e.said(request).granted.len() == all);
    }

    /// A request with a remote prefill arrives and its blocks are allocated.
    pub fn load(&mut self, request: &str, params: &TransferParams, lists: &Lists, tokens: u64) {
        self.scheduler.arrived(request, params).unwrap();
        let found = self.scheduler.matched(request, params, tokens, 0).unwrap();
        assert_eq!((found.tokens, found.asynchronous), (tokens, true));
        self.scheduler.allocated(request, params, blocks(lists), tokens, tokens).unwrap();
        self.step();
    }

    /// As `load`, of the last `external` tokens of a prompt of `prompt`. `change` may change the load of a rank.
    pub fn load_part(
        &mut self,
        request: &str,
        params: &TransferParams,
        lists: &Lists,
        (prompt, external): (u64, u64),
        change: impl Fn(RankId, &mut Load),
    ) {
        self.scheduler.arrived(request, params).unwrap();
        self.scheduler.allocated(request, params, blocks(lists), prompt, external).unwrap();
        let step = StepMetadata::from_bytes(&self.scheduler.step().unwrap()).unwrap();
        for worker in &mut self.workers {
            let mut step = step.clone();
            step.loads.iter_mut().for_each(|load| change(worker.rank, load));
            worker.ok(&Ask::Submit { step: step.to_bytes().unwrap() });
        }
    }

    /// Checks every byte of every rank.
    pub fn check(&mut self, loads: &[(&str, &Lists)]) {
        let loads: Vec<Loaded> = loads.iter().map(|(request, blocks)| Loaded::whole(request, blocks)).collect();
        for told in self.ask_all(&Ask::Check { loads }) {
            assert!(matches!(told, Tell::Count(1..)), "{told:?}");
        }
    }

    /// Waits until what every worker tells about itself is so.
    pub fn until_stats(&mut self, what: &str, enough: impl Fn(usize, usize, u64) -> bool) {
        let start = Instant::now();
        for worker in &mut self.workers {
            loop {
                let Tell::Stats { loads, leases, transfers, .. } = worker.ok(&Ask::Stats) else { panic!("no stats") };
                if enough(loads, leases, transfers) {
                    break;
                }
                assert!(start.elapsed() < LONG, "waiting for {what}: {loads} loads, {leases} leases");
                std::thread::sleep(std::time::Duration::from_millis(5));
            }
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // All shut down at the same time; each is then waited for.
        self.workers.iter_mut().for_each(Child::end);
    }
}

/// Block lists for a prompt of `blocks4` blocks of 4 tokens: the full group's, and those of the window of 6 tokens at
/// 2 tokens a block, of which 3 can be in the window and the rest are null. `first` is the lowest id used; the order
/// is scrambled so that runs of neighbours and jumps both occur.
pub fn lists(first: u32, blocks4: u32, reversed: bool) -> Lists {
    let mut full: Vec<u32> = (first..first + blocks4).collect();
    let halves = blocks4 * 2;
    let kept = halves.min(3);
    let mut window: Vec<u32> = (first + 1..first + 1 + kept).collect();
    if reversed {
        full.reverse();
        window.rotate_left(1);
    }
    let mut padded = vec![0; (halves - kept) as usize];
    padded.extend(window);
    vec![full, padded]
}
