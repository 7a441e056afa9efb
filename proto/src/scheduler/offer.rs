//! The end of a request: which blocks are kept for another engine, and the params that offer them.

use super::{
    FinishOutcome, FinishResult, KeptConversation, KeptPrefill, MAX_LEASE_ID, MultiTurn, PrefillNotice, RunningPrefill,
    SchedulerMachine, params,
};
use crate::aggregate::RequestSide;
use crate::error::{Error, ErrorKind, Result};
use crate::ids::RequestId;
use crate::wire::{Blocks, Grant, Prefill, TransferParams};

/// Prefills that are told of while they are under way. A host that finishes what it begins has no more than its engine runs.
const MAX_UNDER_WAY: usize = 65_536;

impl RunningPrefill {
    /// True if these blocks, with so many tokens, can be those that were told of before and what has come since.
    fn continues(&self, blocks: &[Blocks], tokens: u64) -> bool {
        tokens >= self.tokens && self.blocks.iter().zip(blocks).all(|(known, now)| now.ids().starts_with(known.ids()))
    }
}

impl SchedulerMachine {
    /// Producer: announces that the first `tokens` tokens of a prefill under way are written. All ranks have written
    /// them into these blocks (per KV-cache group, in the order of the tokens; those of groups with windows, chunks
    /// or states are ignored). Consumers may await the prefill as `name`. `tokens` 0: the blocks that were given
    /// before are given away, as when the request is preempted. To be called until [`SchedulerMachine::finished`] is,
    /// and behind it, while the blocks are kept, if what was written last is known only then.
    ///
    /// Consumers read what they are told of, but rely on it only if the lease that goes with it is granted at the end. So it does
    /// no harm but work if a host tells late that blocks were given away. It must tell before it tells of others; other blocks
    /// than before, and fewer tokens, are taken for that.
    ///
    /// Of several requests with one name the first counts.
    ///
    /// Behind `finished` the blocks are those that it was given, and `blocks` is ignored.
    ///
    /// Errors: [`ErrorKind::InvalidArgument`] for a wrong number of lists, or one that does not hold so many tokens;
    /// [`ErrorKind::Exhausted`] when too many are under way.
    pub fn progressed(&mut self, request: &RequestId, name: &RequestId, blocks: &[Blocks], tokens: u64) -> Result<()> {
        if tokens == 0 {
            let begun = self.running.remove(request);
            self.notices.extend(begun.map(|begun| PrefillNotice::Retracted(begun.name)));
            return Ok(());
        }
        if let Some(KeptPrefill { name: called, unannounced }) = self.sends.get(request) {
            if let (Some(prefill), true) = (unannounced, called.as_ref() == Some(name)) {
                let tokens = tokens.min(prefill.tokens);
                let written =
                    Prefill { blocks: self.written(request, &prefill.blocks, tokens)?, tokens, ..prefill.clone() };
                self.notices.push_back(PrefillNotice::Written(written));
            }
            return Ok(());
        }
        let written = self.written(request, blocks, tokens)?;
        let another = |(other, begun): (&RequestId, &RunningPrefill)| other != request && begun.name == *name;
        if self.names.contains(name) || self.running.iter().any(another) {
            return Ok(());
        }
        let known = self.running.get(request).filter(|begun| begun.name == *name && begun.continues(&written, tokens));
        let lease_id = match known {
            Some(begun) => begun.lease_id,
            None if self.running.len() >= MAX_UNDER_WAY && !self.running.contains_key(request) => {
                return Err(Error::new(
                    ErrorKind::Exhausted,
                    format!(
                        "request {request}: {MAX_UNDER_WAY} prefills under way are told of, and none of them has finished"
                    ),
                ));
            }
            None => self.next_lease(),
        };
        let begun = RunningPrefill { name: name.clone(), lease_id, blocks: written.clone(), tokens };
        self.running.insert(request.clone(), begun);
        let (request, lease_ms) = (name.clone(), self.config.lease_ms);
        self.notices.push_back(PrefillNotice::Written(Prefill {
            request,
            blocks: written,
            tokens,
            lease_ms,
            lease_id,
        }));
        Ok(())
    }

    /// The blocks that hold the first `tokens` tokens, of groups that keep all of them.
    fn written(&self, request: &RequestId, blocks: &[Blocks], tokens: u64) -> Result<Vec<Blocks>> {
        self.check_lists(request, blocks)?;
        let groups = self.config.groups.iter().zip(blocks).enumerate();
        let written = groups.map(|(number, (group, list))| {
            if !group.kind.keeps_all() {
                return Ok(Blocks::default());
            }
            let used = tokens.div_ceil(group.span());
            let ids = usize::try_from(used).ok().and_then(|used| list.ids().get(..used)).ok_or_else(|| {
                Error::invalid(format!(
                    "request {request}, KV-cache group {number}: {tokens} tokens are said to be written, which {used} blocks hold, but \
                     {} were given",
                    list.len()
                ))
            })?;
            Ok(Blocks::from(ids.to_vec()))
        });
        written.collect()
    }

    /// The id of the next lease.
    fn next_lease(&mut self) -> u64 {
        self.lease_id = self.lease_id % MAX_LEASE_ID + 1;
        self.lease_id
    }

    /// A prefill that has ended.
    pub(super) fn finished_prefill(
        &mut self,
        request: &RequestId,
        name: Option<&RequestId>,
        outcome: FinishOutcome,
        blocks: &[Blocks],
        computed_tokens: u64,
        begun: Option<&RunningPrefill>,
    ) -> Result<FinishResult> {
        let called = name.unwrap_or(request);
        self.check_free(request, called)?;
        if outcome == FinishOutcome::Aborted {
            self.drop_prefill(called);
            return Ok(FinishResult::default());
        }
        let offered = self.offered(request, blocks, computed_tokens)?;
        if offered.iter().all(Vec::is_empty) {
            self.drop_prefill(called);
            return Ok(FinishResult::default());
        }
        let late = self.config.written_late;
        let name = if late { Some(called) } else { name };
        let lease_ms = self.config.lease_ms;
        let kept = offered.iter().map(|ids| Blocks::from(ids.as_slice())).collect::<Vec<_>>();
        let begun = begun.filter(|begun| name == Some(&begun.name) && begun.continues(&kept, computed_tokens));
        let lease_id = begun.map_or_else(|| self.next_lease(), |begun| begun.lease_id);
        let mut params = self.grant(request, name, false, (lease_ms, lease_id), offered, computed_tokens)?;
        params.do_remote_prefill = true;
        if late {
            // The listener tells them when all workers have said that they are written.
            params.transfer_id = params.remote_request_id.take();
            params.remote_block_ids = None;
        }
        Ok(FinishResult { keep: true, params: Some(params) })
    }

    /// Tells the workers, and so the consumers that ask them, that a prefill is not kept.
    pub(super) fn drop_prefill(&mut self, called: &RequestId) {
        self.stats.drops += 1;
        self.step.dropped.push(called.clone());
    }

    /// A decoded request, whose blocks the prefill engine of the conversation's next turn may load.
    pub(super) fn finished_turn(
        &mut self,
        request: &RequestId,
        blocks: &[Blocks],
        computed_tokens: u64,
    ) -> Result<FinishResult> {
        let Some(MultiTurn { lease_ms, most_blocks, .. }) = self.config.multi_turn else {
            return Ok(FinishResult::default());
        };
        self.check_free(request, request)?;
        let offered = self.offered(request, blocks, computed_tokens)?;
        let count = offered.iter().map(Vec::len).sum::<usize>() as u64;
        if count == 0 || count > most_blocks || !params::continues(&self.config, &offered, computed_tokens) {
            return Ok(FinishResult::default());
        }
        let lease_id = self.next_lease();
        let mut params = self.grant(request, None, true, (lease_ms, lease_id), offered, computed_tokens)?;
        params.do_remote_decode = true;
        // An engine that reads an evicted one learns from the verdict that its read does not count.
        let kept: u64 = self.histories.iter().filter(|history| !history.evicted).map(|history| history.blocks).sum();
        let mut excess = kept.saturating_sub(most_blocks - count);
        self.evict_while(|blocks| {
            let evict = excess > 0;
            excess = excess.saturating_sub(blocks);
            evict
        });
        self.histories.push_back(KeptConversation { request: request.clone(), blocks: count, evicted: false });
        Ok(FinishResult { keep: true, params: Some(params) })
    }

    /// Refuses a request of which something is kept already, and a name that consumers have for another.
    fn check_free(&self, request: &RequestId, called: &RequestId) -> Result<()> {
        if self.sends.contains_key(request) {
            return Err(Error::new(
                ErrorKind::AlreadyExists,
                format!("request {request} has finished already, and its blocks are kept for a decoder"),
            ));
        }
        if self.names.contains(called) {
            return Err(Error::new(
                ErrorKind::AlreadyExists,
                format!(
                    "request {request}: a request of transfer_id {called} has finished already, and its blocks are kept for \
                     a decoder; give each request a transfer_id of its own"
                ),
            ));
        }
        Ok(())
    }

    /// Refuses a wrong number of lists.
    fn check_lists(&self, request: &RequestId, blocks: &[Blocks]) -> Result<()> {
        if blocks.len() != self.config.groups.len() {
            return Err(Error::invalid(format!(
                "request {request}: expected one list of blocks for each of the {} KV-cache groups, got {}",
                self.config.groups.len(),
                blocks.len()
            )));
        }
        Ok(())
    }

    /// The part of `blocks`, which hold `tokens` tokens, that consumers can need.
    fn offered(&self, request: &RequestId, blocks: &[Blocks], tokens: u64) -> Result<Vec<Vec<u32>>> {
        self.check_lists(request, blocks)?;
        let groups = self.config.groups.iter().zip(blocks);
        let offered = groups.map(|(group, list)| {
            // A host may have blocks beyond the computed tokens (for tokens to come): they hold nothing yet.
            let used = tokens.div_ceil(group.span());
            let list = list.ids().get(..usize::try_from(used).unwrap_or(usize::MAX)).unwrap_or(list.ids());
            let needed = params::needed(group, list, tokens).iter().copied();
            needed.skip_while(|&id| self.config.null_block == Some(id)).collect()
        });
        Ok(offered.collect())
    }

    /// Keeps `offered` under a lease, which workers get with the next step. The params that come back name no direction yet.
    fn grant(
        &mut self,
        request: &RequestId,
        name: Option<&RequestId>,
        history: bool,
        (lease_ms, lease_id): (u64, u64),
        offered: Vec<Vec<u32>>,
        computed_tokens: u64,
    ) -> Result<TransferParams> {
        let called = name.unwrap_or(request);
        let Some((host, port)) = &self.address else {
            return Err(Error::invalid(format!(
                "request {request} cannot be handed over: this engine has no handshake listener yet; hand the workers' \
                 metadata to the scheduler side (serve) before the first request"
            )));
        };
        let params = TransferParams {
            do_remote_prefill: false,
            do_remote_decode: false,
            remote_engine_id: Some(self.config.engine_id.to_string()),
            remote_incarnation: Some(self.config.incarnation.to_string()),
            transfer_id: None,
            remote_request_id: Some(called.to_string()),
            remote_host: Some(host.clone()),
            remote_port: Some(i64::from(*port)),
            remote_block_ids: Some(offered.iter().map(|ids| ids.iter().map(|&id| i64::from(id)).collect()).collect()),
            remote_num_tokens: i64::try_from(computed_tokens).ok(),
            remote_lease_ms: i64::try_from(lease_ms).ok(),
            remote_lease_id: i64::try_from(lease_id).ok(),
            tp_size: Some(i64::from(self.config.tp_size)),
            pp_size: Some(i64::from(self.config.pp_size)),
            dcp_size: Some(i64::from(self.config.dcp_size)),
            shared: None,
            transfer_mode: Some("pull".into()),
        };
        // An earlier request of this name, dropped in this very step: workers take grants before drops.
        self.step.dropped.retain(|dropped| dropped != called);
        self.stats.grants += 1;
        let unannounced = name.map(|name| {
            let blocks = offered.into_iter().map(Blocks::from).collect();
            Prefill { request: name.clone(), blocks, tokens: computed_tokens, lease_ms, lease_id }
        });
        self.step.grants.push(Grant { request: request.clone(), lease_ms, lease_id, name: name.cloned(), history });
        self.aggregator.forget_side(request, RequestSide::Send);
        self.sends.insert(request.clone(), KeptPrefill { name: name.cloned(), unannounced });
        self.names.insert(called.clone());
        Ok(params)
    }
}
