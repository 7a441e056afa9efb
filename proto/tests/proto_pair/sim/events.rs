//! What happens in time: deliveries, connections, transfers, and what the machines want done.

use super::*;

impl Sim {
    /// Lets `span` of simulated time pass.
    pub fn run(&mut self, span: Duration) {
        let end = self.now + span;
        self.pump();
        loop {
            let event = self.events.keys().next().map(|(at, _)| *at);
            let timer = [self.d.poll_timeout(), self.p.worker.poll_timeout()].into_iter().flatten().min();
            let Some(next) = [event, timer].into_iter().flatten().min().filter(|at| *at <= end) else { break };
            self.now = self.now.max(next);
            if event.is_some_and(|at| at <= next) {
                let (_, event) = self.events.pop_first().unwrap();
                self.handle(event);
            } else {
                self.d.handle_timeout(self.now);
                self.p.worker.handle_timeout(self.now);
            }
            for worker in [&mut self.d, &mut self.p.worker] {
                if event.is_none_or(|at| at > next) {
                    let due = worker.poll_timeout();
                    assert!(due.is_none_or(|due| due > self.now), "a timeout that is handled is over");
                }
            }
            self.pump();
        }
        self.now = end;
    }

    fn handle(&mut self, event: Event) {
        let now = self.now;
        match event {
            Event::StepP(life, step) if life == self.p.life => self.p.worker.handle_step(now, step),
            Event::StepD(step) => self.d.handle_step(now, step),
            Event::ReportP(life, report) if life == self.p.life => {
                for id in &report.finished_sending {
                    assert!(self.p.requests.get(id).is_some_and(|r| r.kept), "{id} finished sending once");
                    self.p_free(id);
                }
                let sent: HashSet<RequestId> = report.finished_sending.iter().cloned().collect();
                let outcome = self.p.scheduler.on_report(&report.into()).unwrap();
                assert_eq!(HashSet::from_iter(outcome.finished_sending), sent, "one rank is all ranks");
                self.p_tell();
            }
            Event::StepP(..) | Event::ReportP(..) => {}
            Event::ReportD(report) => self.report_d(&report),
            Event::Handshake(id) => {
                let result = if now < self.down_until {
                    Err(HandshakeFailure { cause: Cause::HandshakeFailed, message: "connection refused".into() })
                } else {
                    let ask = HandshakeRequest::Query { id: id.0, engine: Some(engine("p")), ranks: vec![] };
                    let reply = self.p.directory.answer(&ask.to_bytes().unwrap());
                    Ok(HandshakeReply::from_bytes(&reply).unwrap())
                };
                self.d.handle_handshake(now, id, result);
            }
            Event::Asked(number, request, from) => {
                if now < self.down_until {
                    let refused = Err((Cause::HandshakeFailed, "connection refused".into()));
                    return self.d.handle_prefill(now, number, refused);
                }
                let (engine, requests, from_tokens) = (engine("p"), vec![request], vec![from]);
                let ask = HandshakeRequest::Await { id: number.0, engine, requests, from_tokens };
                let answer = self.p.directory.answer_to(&number.0.to_le_bytes(), &ask.to_bytes().unwrap());
                answer.into_iter().for_each(|reply| self.told(number, &reply));
            }
            Event::Prefilled(number, result) => {
                if self.awaited.remove(&number) {
                    self.d.handle_prefill(now, number, result);
                }
            }
            Event::Connected(key) => {
                if self.connections.get(&key.connection).is_some_and(|c| c.open) {
                    self.d.handle_connected(now, &key);
                }
            }
            Event::Lost(key) => self.d.handle_peer_lost(now, &PeerRef::Outbound(key), "connection reset"),
            Event::Transfer(token) => self.transfer_done(token),
            Event::ToP(number, message) => {
                let c = &self.connections[&number];
                if c.life == self.p.life && c.open {
                    self.p.worker.handle_message(now, &PeerRef::Inbound(number), message);
                }
            }
            Event::ToD(key, message) => {
                if self.connections.get(&key.connection).is_some_and(|c| c.open) {
                    self.d.handle_message(now, &PeerRef::Outbound(key), message);
                }
            }
        }
    }

    /// What P has where a plan reads.
    fn p_bytes(&self, plan: &CopyPlan) -> Vec<u8> {
        let read = |op: kvferry_proto::plan::Operation| {
            let from = op.remote_offset as usize;
            self.p.memory.regions[op.remote_region as usize][from..from + op.len as usize].to_vec()
        };
        plan.clone().expand(64).flat_map(read).collect()
    }

    fn transfer_done(&mut self, token: TransferToken) {
        if self.now < self.partition_until {
            let at = self.partition_until;
            return self.at(at, Event::Transfer(token));
        }
        // A cancelled or broken transfer has two completions scheduled; the first one counts.
        let Some(t) = self.transfers.remove(&token) else { return };
        let alive = self.connections[&t.connection].life == self.p.life;
        let changed = alive && t.seen.is_some_and(|seen| seen != self.p_bytes(&t.plan));
        let (mut bytes, mut operations) = (0, 0);
        if alive {
            let all = t.plan.bytes();
            for op in t.plan.clone().expand(64) {
                if t.failure.is_some() && bytes * 2 >= all {
                    break;
                }
                let from = op.remote_offset as usize;
                let to = op.local_offset as usize;
                let len = op.len as usize;
                self.assert_writable(op.local_region as usize, to, len);
                let data = self.p.memory.regions[op.remote_region as usize][from..from + len].to_vec();
                self.d_memory.regions[op.local_region as usize][to..to + len].copy_from_slice(&data);
                let blocks = (to / self.d_memory.stride) as u32..((to + len).div_ceil(self.d_memory.stride)) as u32;
                self.written.extend(blocks.map(|block| (op.local_region as usize, block)));
                bytes += op.len;
                operations += 1;
            }
        }
        let mismatch = || changed.then(|| (Cause::DigestMismatch, "not what P had".into()));
        let result = match t.failure.or_else(mismatch) {
            Some(failure) => Err(failure),
            None => Ok(TransferFigures {
                bytes,
                operations,
                posted_at: t.posted,
                all_posted_at: t.posted,
                finished_at: self.now,
            }),
        };
        self.d.handle_transfer_done(self.now, token, result);
    }

    fn assert_writable(&self, group: usize, at: usize, len: usize) {
        let stride = self.d_memory.stride;
        for block in at / stride..(at + len).div_ceil(stride) {
            let owner = self
                .requests
                .iter()
                .find(|r| r.local.as_ref().is_some_and(|lists| lists[group].contains(&(block as u32))));
            assert!(owner.is_some_and(|r| r.loading), "block {block} of group {group} written while nothing loads it");
        }
    }

    fn report_d(&mut self, report: &WorkerReport) {
        for id in &report.finished_recving {
            let i = self.requests.iter().position(|r| r.id == *id).expect("a known request");
            assert!(self.requests[i].loading && self.requests[i].outcome.is_none(), "{id}: one terminal report");
            let local = self.requests[i].local.clone().expect("blocks stay until the report");
            let failure = report.failed_recving.iter().find(|f| f.request == *id);
            let outcome = match failure {
                Some(failure) => {
                    let mut all: Vec<u32> = local.iter().flatten().copied().collect();
                    all.sort_unstable();
                    assert_eq!(failure.invalid_blocks.ids(), all, "every local block is suspect");
                    Err(failure.cause)
                }
                None => {
                    self.check_bytes(i, &local);
                    Ok(())
                }
            };
            let record = report.records.iter().find(|r| r.request == *id).expect("figures of every load");
            assert_eq!(record.cause, outcome.err());
            let r = &mut self.requests[i];
            r.loading = false;
            r.outcome = Some(outcome);
            if r.ended {
                self.d_free_request(i);
            }
        }
        for failure in &report.failed_recving {
            assert!(report.finished_recving.contains(&failure.request), "a failure is reported as finished too");
        }
        let received: HashSet<RequestId> = report.finished_recving.iter().cloned().collect();
        let outcome = self.d_scheduler.on_report(&report.clone().into()).unwrap();
        assert_eq!(HashSet::from_iter(outcome.finished_recving), received, "one rank is all ranks");
        self.d_step();
    }

    /// A load that was reported right has the right bytes, all of them.
    fn check_bytes(&mut self, i: usize, local: &[Vec<u32>; 2]) {
        let (prefill, total) = (self.requests[i].prefill, self.requests[i].blocks_total);
        for (group, blocks) in local.iter().enumerate() {
            for (k, &block) in blocks.iter().enumerate() {
                let position = total - blocks.len() + k;
                let found = self.d_memory.block(group, block).to_vec();
                assert_eq!(found, tag(prefill, group, position), "prefill {prefill} group {group} block {position}");
            }
        }
    }

    /// Does what the machines want done.
    pub(super) fn pump(&mut self) {
        while let Some(action) = self.d.poll_action() {
            self.act(action);
        }
        while let Some(action) = self.p.worker.poll_action() {
            let Action::Send { peer: PeerRef::Inbound(number), message } = action else {
                panic!("a producer only answers: {action:?}")
            };
            if let PeerMessage::Verdict { request, verdict: Verdict::Valid, serial } = &message {
                let kept = self.p.requests.values().any(|r| r.kept && r.called == *request);
                let again = !self.judged.insert((self.p.life, *serial));
                assert!(kept || again, "{request} is found good when its blocks are free");
            }
            self.send(number, 1, message);
        }
        if let Some(report) = self.d.poll_report() {
            self.at(self.now + ms(1), Event::ReportD(report));
        }
        if let Some(report) = self.p.worker.poll_report() {
            self.at(self.now + ms(1), Event::ReportP(self.p.life, report));
        }
    }

    fn act(&mut self, action: Action) {
        let soon = (self.now + self.delay).max(self.partition_until);
        match action {
            Action::Handshake { session, engine: name, host, port, .. } => {
                assert_eq!((name, host.as_str(), port), (engine("p"), "10.0.0.1", 5680));
                self.at(soon, Event::Handshake(session));
            }
            Action::Await { number, engine: name, host, port, request, from_tokens } => {
                assert_eq!((name, host.as_str(), port), (engine("p"), "10.0.0.1", 5680));
                assert!(self.awaited.insert(number), "a wait's number is new");
                self.at(soon, Event::Asked(number, request, from_tokens));
            }
            Action::Forget { number } => drop(self.awaited.remove(&number)),
            Action::Connect { peer, metadata } => {
                assert_eq!(peer.incarnation, metadata.incarnation);
                let life = metadata.incarnation.0 - 1_000;
                let open = life == self.p.life && self.now >= self.down_until;
                let connection = Connection { key: peer.clone(), life, open, last: [Time(0); 2] };
                assert!(self.connections.insert(peer.connection, connection).is_none(), "a connection's number is new");
                self.at(soon, if open { Event::Connected(peer) } else { Event::Lost(peer) });
            }
            Action::Transfer { token, peer, plan } => {
                assert!(self.tokens_seen.insert(token), "a token is used once");
                let open = self.connections[&peer.connection].open;
                let failing = !open || std::mem::take(&mut self.fail_next_transfer);
                let failure = failing.then(|| (Cause::TransportError, "posting failed".into()));
                let posted = self.now;
                let seen = (self.verify && open).then(|| self.p_bytes(&plan));
                self.transfers.insert(token, Transfer { connection: peer.connection, plan, failure, posted, seen });
                self.at(self.now + self.transfer_time, Event::Transfer(token));
            }
            Action::Cancel { token } => {
                if let Some(t) = self.transfers.get_mut(&token) {
                    t.failure.get_or_insert((Cause::TransportError, "cancelled".into()));
                    self.at(self.now + self.cancel_time, Event::Transfer(token));
                }
            }
            Action::Send { peer: PeerRef::Outbound(key), message } => {
                self.sent.push(message.clone());
                self.send(key.connection, 0, message);
            }
            Action::Send { .. } => panic!("the consumer speaks only to those that it connected to"),
            Action::Disconnect { peer } => {
                let pending = self.transfers.values().any(|t| t.connection == peer.connection);
                assert!(!pending, "no disconnect under a transfer");
                // What was sent before is delivered: the peer stays open for the messages under way.
                assert!(self.connections.contains_key(&peer.connection));
            }
        }
    }

    fn send(&mut self, number: u64, direction: usize, message: PeerMessage) {
        if direction == 1 && self.drop_verdicts {
            return;
        }
        let soon = (self.now + self.delay).max(self.partition_until);
        let Some(c) = self.connections.get_mut(&number) else { panic!("message for unknown connection {number}") };
        let at = soon.max(c.last[direction]);
        c.last[direction] = at;
        let event = if direction == 0 { Event::ToP(number, message) } else { Event::ToD(c.key.clone(), message) };
        self.at(at, event);
    }

    // ---- the end ---------------------------------------------------------------------------------------------------

    /// How many blocks were read so far.
    pub fn read(&self) -> usize {
        self.written.len()
    }

    /// Of these, those of a request that holds its blocks.
    pub fn read_of(&self, i: usize) -> usize {
        let held =
            |(group, block): &&(usize, u32)| self.requests[i].local.as_ref().is_some_and(|l| l[*group].contains(block));
        self.written.iter().filter(held).count()
    }

    pub fn outcome(&self, i: usize) -> Option<Result<(), Cause>> {
        self.requests[i].outcome
    }

    pub fn p_kept(&self) -> usize {
        self.p.scheduler.sending()
    }

    pub fn p_gauges(&self) -> kvferry_proto::worker::MachineGauges {
        self.p.worker.gauges()
    }

    /// Everything ends, and nothing is left over anywhere.
    pub fn settle(&mut self) {
        self.drop_verdicts = false;
        self.run(ms(15_000));
        for i in 0..self.requests.len() {
            if self.p.begun.contains_key(&self.requests[i].prefill) {
                self.complete(i, true);
            }
        }
        for i in 0..self.requests.len() {
            self.finish(i, FinishOutcome::Complete);
        }
        self.run(ms(60_000));
        for r in &self.requests {
            assert_eq!(r.load_given, r.outcome.is_some(), "{}: a terminal report for every load", r.id);
        }
        assert!(self.transfers.is_empty());
        assert!(self.awaited.is_empty(), "the consumer waits for nothing that it does not want");
        assert_eq!(self.d.gauges(), Default::default(), "the consumer has forgotten everything");
        assert_eq!(self.p.worker.gauges(), Default::default(), "the producer has forgotten everything");
        assert_eq!((self.d_scheduler.receiving(), self.p.scheduler.sending()), (0, 0));
        assert!(!self.d_scheduler.has_pending() && !self.p.scheduler.has_pending());
        assert_eq!(self.p.free.len(), BLOCKS as usize - 1, "all of P's blocks are free");
        assert_eq!(self.d_free.len(), BLOCKS as usize - 1, "all of D's blocks are free");
        assert!(self.d.poll_timeout().is_none() && self.p.worker.poll_timeout().is_none(), "idle machines sleep");
    }
}
