//! One engine's scheduler side: the state machine, and the listener that serves the ranks' metadata.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use super::channel::lock;
use super::config::SchedulerConfig;
use crate::error::{Error, ErrorKind, Result};
use crate::net::{self, AuthLayer, Listener, ListenerConfig, RequestHandler};
use crate::proto::aggregate::{Outcome, RequestSide};
use crate::proto::handshake::{ClientId, Directory, Pushes};
use crate::proto::ids::{EngineId, Incarnation, RankId, RequestId};
use crate::proto::scheduler::{
    FinishOutcome, FinishResult, PrefillNotice, PrefixMatch, SchedulerMachine, SchedulerMachineConfig, SchedulerStats,
};
use crate::proto::wire::{Blocks, ReportBatch, TransferParams};
use crate::secret::Key;

/// One engine's scheduler side, producer and consumer at once. `Send` and `Sync`; no call waits for another process.
pub struct Scheduler {
    config: SchedulerConfig,
    machine: Mutex<SchedulerMachine>,
    directory: Arc<Mutex<Directory>>,
    listener: Mutex<Option<Listener>>,
    key: Option<Key>,
    /// True if the machine knows what every rank holds.
    engine_known: AtomicBool,
}

fn draw_life() -> Result<Incarnation> {
    Ok(Incarnation(random("the engine's incarnation")?.max(1)))
}

impl Scheduler {
    /// Draws this life's incarnation. With `push` configured the listener is bound now, so that workers can push to
    /// [`Scheduler::address`]; otherwise [`Scheduler::serve`] binds it.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for a configuration that cannot work, by key; those of [`Key::load`] and
    /// [`Listener::bind_handler`].
    pub fn start(config: SchedulerConfig) -> Result<Scheduler> {
        config.check()?;
        let key = Key::configured(config.key_file.as_deref())?;
        let incarnation = draw_life()?;
        let machine = SchedulerMachine::new(SchedulerMachineConfig {
            engine_id: config.engine_id.clone(),
            incarnation,
            tp_size: config.tp_size,
            pp_size: config.pp_size,
            dcp_size: config.dcp_size,
            groups: config.groups.clone(),
            null_block: config.null_block,
            reuses_blocks: config.reuses_blocks,
            lease_ms: config.lease_ms,
            written_late: config.written_late,
            multi_turn: config.multi_turn(),
            allowed_hosts: config.allowed_hosts()?,
        })?;
        let pushes = if config.push { Pushes::Accepted } else { Pushes::Refused };
        let directory = Directory::new(config.engine_id.clone(), incarnation, config.shape(), pushes)?;
        let scheduler = Scheduler {
            machine: Mutex::new(machine),
            directory: Arc::new(Mutex::new(directory)),
            listener: Mutex::new(None),
            key,
            engine_known: AtomicBool::new(false),
            config,
        };
        if scheduler.config.push {
            scheduler.listen()?;
        }
        Ok(scheduler)
    }

    /// The engine.
    pub fn engine(&self) -> &EngineId {
        &self.config.engine_id
    }

    /// This life of the engine.
    pub fn incarnation(&self) -> Incarnation {
        lock(&self.directory).incarnation()
    }

    /// Takes the encoded `RankMetadata` of the engine's ranks and serves them. Returns the host and port that are
    /// advertised. The listener is bound when this returns. Includes [`Scheduler::set_engine`].
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for a rank that is missing or does not fit this engine (nothing is served then);
    /// those of [`Listener::bind_handler`].
    pub fn serve(&self, ranks: Vec<(RankId, Vec<u8>)>) -> Result<(String, u16)> {
        self.set_engine(ranks)?;
        self.listen()
    }

    /// Takes the encoded `RankMetadata` of the engine's ranks without serving them. That is enough for an engine that
    /// only receives. The workers are told with the next step what all ranks hold, so that producers of any shape can
    /// be read from.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for a rank that is missing or does not fit this engine.
    pub fn set_engine(&self, ranks: Vec<(RankId, Vec<u8>)>) -> Result<()> {
        let mut missing: BTreeSet<RankId> = self.config.shape().rank_ids().collect();
        for (rank, metadata) in ranks {
            lock(&self.directory).offer_of(rank, metadata)?;
            missing.remove(&rank);
        }
        if !missing.is_empty() && !self.config.push {
            let list = missing.iter().map(|r| r.to_string()).collect::<Vec<_>>().join(", ");
            return Err(Error::invalid(format!(
                "the metadata of {} of the engine's ranks is missing: {list}; tp_size is {}, pp_size {}: give every \
                 rank's, or configure push to have ranks hand theirs in one by one",
                missing.len(),
                self.config.tp_size,
                self.config.pp_size
            )));
        }
        Ok(())
    }

    /// Hands what all ranks hold to the machine, once, as soon as every rank is known.
    fn tell_engine(&self) {
        if self.engine_known.load(Ordering::Acquire) {
            return;
        }
        let Some(holdings) = lock(&self.directory).holdings() else { return };
        if !self.engine_known.swap(true, Ordering::AcqRel) {
            lock(&self.machine).set_engine(holdings);
        }
    }

    /// Replaces the encoded `RankMetadata` of all ranks, whose workers are new. So after an engine's sleep, in which
    /// its cache was not mapped. Requests that wait to be loaded are told to the new workers. The engine has another
    /// incarnation from then on.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] before the engine's ranks were known; those of [`Directory::renew`].
    pub fn renew(&self, ranks: Vec<(RankId, Vec<u8>)>) -> Result<()> {
        let mut directory = lock(&self.directory);
        if !directory.is_ready() {
            return Err(Error::invalid(
                "the engine's ranks are not known yet, so that none can have been started anew",
            ));
        }
        let life = draw_life()?;
        if !directory.renew(ranks, life)? {
            return Ok(());
        }
        let holdings = directory.holdings();
        drop(directory);
        self.engine_known.store(true, Ordering::Release);
        if let Some(holdings) = holdings {
            lock(&self.machine).renew_engine(life, holdings);
        }
        Ok(())
    }

    /// The host and port that are advertised, once the listener is bound.
    pub fn address(&self) -> Option<(String, u16)> {
        lock(&self.listener).as_ref().map(|l| (l.host().to_owned(), l.port()))
    }

    fn listen(&self) -> Result<(String, u16)> {
        let mut listener = lock(&self.listener);
        if listener.is_none() {
            let SchedulerConfig { host, bind, advertise_local, .. } = &self.config;
            let address = net::choose(host.as_deref(), bind.as_deref(), *advertise_local)?;
            let auth = AuthLayer::new(self.key.clone(), &address);
            let config = ListenerConfig { address, port: self.config.bind_port()?, pushes: self.config.push };
            let handler = ListenerHandler { auth, directory: Arc::clone(&self.directory) };
            *listener = Some(Listener::bind_handler(&config, handler)?);
        }
        let Some(listener) = listener.as_ref() else {
            return Err(Error::new(ErrorKind::Internal, "the listener is gone"));
        };
        let (host, port) = (listener.host().to_owned(), listener.port());
        lock(&self.machine).set_address(host.clone(), port);
        Ok((host, port))
    }

    /// A request arrived; see [`SchedulerMachine::arrived`].
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for an unusable id or params without a needed key, by its name.
    pub fn arrived(&self, request: &str, params: &TransferParams) -> Result<()> {
        lock(&self.machine).arrived(&RequestId::new(request)?, params)
    }

    /// How many tokens beyond `computed_tokens` of the prompt's `prompt_tokens` can be loaded; see
    /// [`SchedulerMachine::matched`].
    ///
    /// # Errors
    /// As [`Scheduler::arrived`].
    pub fn matched(
        &self,
        request: &str,
        params: &TransferParams,
        prompt_tokens: u64,
        computed_tokens: u64,
    ) -> Result<PrefixMatch> {
        lock(&self.machine).matched(&RequestId::new(request)?, params, prompt_tokens, computed_tokens)
    }

    /// Blocks are allocated; see [`SchedulerMachine::allocated`].
    ///
    /// # Errors
    /// As [`Scheduler::arrived`]; [`ErrorKind::InvalidArgument`] for block lists that do not fit the params'.
    pub fn allocated(
        &self,
        request: &str,
        params: &TransferParams,
        local_blocks: Vec<Blocks>,
        prompt_tokens: u64,
        external_tokens: u64,
    ) -> Result<()> {
        lock(&self.machine).allocated(&RequestId::new(request)?, params, local_blocks, prompt_tokens, external_tokens)
    }

    /// True if a consumer follows the prefill's progress, which it awaits as `name`. [`Scheduler::progressed`] is
    /// worth calling then.
    pub fn is_followed(&self, name: &str) -> bool {
        RequestId::new(name).is_ok_and(|name| lock(&self.directory).is_followed(&name))
    }

    /// A prefill under way is so far; see [`SchedulerMachine::progressed`].
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for an unusable id or name, and for blocks that do not hold so many tokens.
    pub fn progressed(&self, request: &str, name: &str, blocks: &[Blocks], tokens: u64) -> Result<()> {
        let (request, name) = (RequestId::new(request)?, RequestId::new(name)?);
        let random = random("the id of a lease")?;
        let mut machine = lock(&self.machine);
        machine.set_lease_entropy(random);
        let result = machine.progressed(&request, &name, blocks, tokens);
        drop(machine);
        self.send_notices();
        result
    }

    /// A request ended; see [`SchedulerMachine::finished`].
    ///
    /// # Errors
    /// As [`Scheduler::arrived`].
    pub fn finished(
        &self,
        request: &str,
        params: &TransferParams,
        outcome: FinishOutcome,
        blocks: Vec<Blocks>,
        computed_tokens: u64,
    ) -> Result<FinishResult> {
        let request = RequestId::new(request)?;
        let random = random("the id of a lease")?;
        let mut machine = lock(&self.machine);
        machine.set_lease_entropy(random);
        let finish = machine.finished(&request, params, outcome, blocks, computed_tokens);
        drop(machine);
        self.send_notices();
        finish
    }

    /// Tells consumers what has become of prefills that they await.
    fn send_notices(&self) {
        let mut changed = false;
        // Held meanwhile, so that the notices of two threads keep their order. Nobody takes it who has the other.
        let mut machine = lock(&self.machine);
        while let Some(notice) = machine.poll_notice() {
            let mut directory = lock(&self.directory);
            match notice {
                PrefillNotice::Ready(prefill) => directory.prefilled(prefill),
                PrefillNotice::Written(prefill) => directory.prefill_progressed(prefill),
                PrefillNotice::Retracted(request) => directory.prefill_retracted(&request),
                PrefillNotice::Gone(request) => directory.prefill_gone(request),
            }
            changed = true;
        }
        drop(machine);
        if changed && let Some(listener) = lock(&self.listener).as_ref() {
            listener.wake();
        }
    }

    /// Evicts the `most` oldest conversations; see [`SchedulerMachine::forget_histories`].
    pub fn forget_histories(&self, most: usize) -> usize {
        lock(&self.machine).forget_histories(most)
    }

    /// The next step's work for every worker, encoded. What it returns is not returned again; see
    /// [`SchedulerMachine::encode_step`].
    ///
    /// # Errors
    /// [`ErrorKind::Internal`] or [`ErrorKind::Exhausted`] when it cannot be encoded; nothing is taken then.
    pub fn step(&self) -> Result<Vec<u8>> {
        // Ranks that push their metadata may have come since the last step.
        self.tell_engine();
        lock(&self.machine).encode_step()
    }

    /// True if the next step has work, so that an idle engine should make one.
    pub fn has_pending(&self) -> bool {
        lock(&self.machine).has_pending()
    }

    /// Counters and gauges.
    pub fn stats(&self) -> SchedulerStats {
        let listener_requests = lock(&self.listener).as_ref().map_or(0, Listener::requests);
        SchedulerStats { listener_requests, ..lock(&self.machine).stats() }
    }

    /// Takes the report of a rank, or of several; see [`SchedulerMachine::on_report`]. Returns what every rank has reported with it.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for a rank that is not the engine's, [`ErrorKind::Exhausted`] when too many requests
    /// are under way.
    pub fn on_report(&self, reports: &ReportBatch) -> Result<Outcome> {
        let outcome = lock(&self.machine).on_report(reports)?;
        self.send_notices();
        Ok(outcome)
    }

    /// Ends a request on this side, because the host knows that every rank is done. See [`SchedulerMachine::over`]. A
    /// host may have requests of others, whose ids none of ours can have: they are not known either.
    pub fn over(&self, request: &str, direction: RequestSide) {
        let Ok(request) = RequestId::new(request) else { return };
        lock(&self.machine).over(&request, direction);
        self.send_notices();
    }

    /// Stops the listener and frees its port. Harmless when repeated.
    pub fn shutdown(&self) {
        if let Some(mut listener) = lock(&self.listener).take() {
            listener.shutdown();
        }
    }
}

/// 64 bits that nobody can guess.
fn random(what: &str) -> Result<u64> {
    getrandom::u64().map_err(|e| Error::new(ErrorKind::Io, format!("drawing {what} at random from the system: {e}")))
}

/// Answers the listener's requests.
struct ListenerHandler {
    auth: AuthLayer,
    directory: Arc<Mutex<Directory>>,
}

impl RequestHandler for ListenerHandler {
    fn answer(&mut self, client: &[u8], request: &[u8]) -> Option<Vec<u8>> {
        self.auth.answer_to(client, request, |clear| lock(&self.directory).answer_to(client, clear))
    }

    fn poll_reply(&mut self) -> Option<(ClientId, Vec<u8>)> {
        loop {
            let (client, clear) = lock(&self.directory).poll_answer()?;
            if let Some(reply) = self.auth.seal(&client, clear) {
                return Some((client, reply));
            }
        }
    }
}
