//! Prefills that clients await: those that are over, how far the others are, and the clients to tell.
//!
//! A client has one question open at a time, about all that it awaits. When it asks again the older question is answered
//! with nothing, so every question gets exactly one answer, and a client that is gone leaves one behind.

use std::collections::{BTreeMap, HashMap, VecDeque};

use crate::ids::RequestId;
use crate::latest::Latest;
use crate::wire::Prefill;
use crate::wire::limits::MAX_REPLY_BYTES;

/// OpenQuestion questions; the oldest makes room, and its client asks again.
const MAX_OPEN: usize = 4096;
/// The names in open questions, in bytes, each with what it takes to remember it; the oldest question makes room.
const MAX_OPEN_BYTES: usize = 64 << 20;
/// The memory of a name in an open question beside its text, twice: about.
const NAME_BYTES: usize = 100;
/// Prefills that are remembered as gone; the oldest makes room. As many as a worker's tombstones by default.
const MAX_GONE: usize = 16_384;
/// Prefills that were asked how far they are; the oldest makes room, until it is asked for again.
const MAX_FOLLOWED: usize = 16_384;
/// Block ids in one answer. What is left goes with the next.
const MAX_IDS: usize = MAX_REPLY_BYTES / 2 / size_of::<u32>();

/// Names a client for as long as it is connected.
pub type ClientId = Vec<u8>;

/// The answer to a question.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PrefillAnswer {
    /// The protocol version to answer in.
    pub(super) version: u16,
    pub(super) id: u64,
    pub(super) ready: Vec<Prefill>,
    pub(super) gone: Vec<RequestId>,
    pub(super) partial: Vec<Prefill>,
}

/// A prefill that is asked about, and the number of written tokens from which to answer; 0: when it is over.
pub(super) type PrefillQuery = (RequestId, u64);

#[derive(Debug, Clone)]
struct OpenQuestion {
    client: ClientId,
    version: u16,
    id: u64,
    requests: Vec<PrefillQuery>,
}

impl OpenQuestion {
    fn bytes(&self) -> usize {
        self.requests.iter().map(|(name, _)| name.as_str().len().saturating_add(NAME_BYTES).saturating_mul(2)).sum()
    }
}

#[derive(Debug, Clone)]
pub(super) struct Prefills {
    ready: HashMap<RequestId, Prefill>,
    gone: Latest<RequestId, ()>,
    /// How far those under way are.
    partial: HashMap<RequestId, Prefill>,
    /// The prefills whose progress a client follows. A client that has its answer is about to ask again.
    followed: Latest<RequestId, ()>,
    /// From the oldest on.
    open: BTreeMap<u64, OpenQuestion>,
    /// The memory of their names, in bytes.
    open_bytes: usize,
    clients: HashMap<ClientId, u64>,
    /// The questions about each prefill, with the number of written tokens from which to answer.
    about: HashMap<RequestId, BTreeMap<u64, u64>>,
    due: VecDeque<(ClientId, PrefillAnswer)>,
    next: u64,
}

impl Default for Prefills {
    fn default() -> Self {
        Prefills {
            ready: HashMap::new(),
            gone: Latest::new(MAX_GONE),
            partial: HashMap::new(),
            followed: Latest::new(MAX_FOLLOWED),
            open: BTreeMap::new(),
            open_bytes: 0,
            clients: HashMap::new(),
            about: HashMap::new(),
            due: VecDeque::new(),
            next: 0,
        }
    }
}

impl Prefills {
    /// Answers a question about these prefills. With nothing known yet and a `client`, the question stays open and is answered
    /// by [`Prefills::pop_due`].
    pub(super) fn ask(
        &mut self,
        client: Option<&[u8]>,
        version: u16,
        id: u64,
        requests: Vec<PrefillQuery>,
    ) -> Option<PrefillAnswer> {
        if let Some(client) = client
            && let Some(older) = self.clients.remove(client)
        {
            self.answer(older);
        }
        for (request, from) in &requests {
            if *from > 0 && !self.ready.contains_key(request) && !self.gone.contains_key(request) {
                self.followed.insert(request.clone(), ());
            }
        }
        let answer = self.known(version, id, &requests);
        let Some(client) = client else { return Some(answer) };
        if !answer.ready.is_empty() || !answer.gone.is_empty() || !answer.partial.is_empty() || requests.is_empty() {
            return Some(answer);
        }
        self.next += 1;
        for (request, from) in &requests {
            self.about.entry(request.clone()).or_default().insert(self.next, *from);
        }
        self.clients.insert(client.to_owned(), self.next);
        let open = OpenQuestion { client: client.to_owned(), version, id, requests };
        self.open_bytes = self.open_bytes.saturating_add(open.bytes());
        self.open.insert(self.next, open);
        while (self.open.len() > MAX_OPEN || self.open_bytes > MAX_OPEN_BYTES)
            && let Some((&oldest, _)) = self.open.first_key_value()
        {
            self.answer(oldest);
        }
        None
    }

    /// A prefill is over and its blocks are kept.
    pub(super) fn ready(&mut self, prefill: Prefill) {
        let request = prefill.request.clone();
        // The name was used before.
        self.gone.remove(&request);
        self.retract(&request);
        self.followed.remove(&request);
        self.ready.insert(request.clone(), prefill);
        self.answer_waiting(&request, None);
    }

    /// A prefill is under way, and its blocks hold so many tokens.
    pub(super) fn set_written(&mut self, prefill: Prefill) {
        let (request, tokens) = (prefill.request.clone(), prefill.tokens);
        if self.ready.contains_key(&request) {
            return;
        }
        self.gone.remove(&request);
        self.partial.insert(request.clone(), prefill);
        self.answer_waiting(&request, Some(tokens));
    }

    /// Retracts everything announced about this prefill.
    pub(super) fn retract(&mut self, request: &RequestId) {
        self.partial.remove(request);
    }

    /// Nothing that was said of prefills under way holds any more.
    pub(super) fn retract_all(&mut self) {
        self.partial.clear();
    }

    /// True if a client follows this prefill's progress.
    pub(super) fn is_followed(&self, request: &RequestId) -> bool {
        self.followed.contains_key(request)
    }

    /// Nothing is kept of a prefill (any more).
    pub(super) fn gone(&mut self, request: RequestId) {
        self.ready.remove(&request);
        self.retract(&request);
        self.followed.remove(&request);
        self.gone.insert(request.clone(), ());
        self.answer_waiting(&request, None);
    }

    /// The next answer to a question that was left open.
    pub(super) fn pop_due(&mut self) -> Option<(ClientId, PrefillAnswer)> {
        self.due.pop_front()
    }

    fn known(&self, version: u16, id: u64, requests: &[PrefillQuery]) -> PrefillAnswer {
        let mut answer = PrefillAnswer { version, id, ready: Vec::new(), gone: Vec::new(), partial: Vec::new() };
        let mut ids = 0usize;
        for (request, from) in requests {
            let (prefill, list) = if let Some(prefill) = self.ready.get(request) {
                (prefill, &mut answer.ready)
            } else if self.gone.contains_key(request) {
                answer.gone.push(request.clone());
                continue;
            } else if let Some(prefill) =
                self.partial.get(request).filter(|prefill| is_far_enough(prefill.tokens, *from))
            {
                (prefill, &mut answer.partial)
            } else {
                continue;
            };
            let before = ids;
            ids = prefill.blocks.iter().fold(ids, |sum, blocks| sum.saturating_add(blocks.len()));
            if before == 0 || ids <= MAX_IDS {
                list.push(prefill.clone());
            }
        }
        answer
    }

    /// Answers the questions about a prefill that has `tokens` tokens written, or is over.
    fn answer_waiting(&mut self, request: &RequestId, tokens: Option<u64>) {
        let asked = self.about.get(request).into_iter().flatten();
        let concerned = asked.filter(|(_, from)| tokens.is_none_or(|tokens| is_far_enough(tokens, **from)));
        let questions: Vec<u64> = concerned.map(|(question, _)| *question).collect();
        for question in questions {
            self.answer(question);
        }
    }

    /// Answers an open question with what is known.
    fn answer(&mut self, question: u64) {
        let Some(open) = self.open.remove(&question) else { return };
        self.open_bytes = self.open_bytes.saturating_sub(open.bytes());
        let OpenQuestion { client, version, id, requests } = open;
        if self.clients.get(&client) == Some(&question) {
            self.clients.remove(&client);
        }
        for (request, _) in &requests {
            if let Some(about) = self.about.get_mut(request) {
                about.remove(&question);
                if about.is_empty() {
                    self.about.remove(request);
                }
            }
        }
        let answer = self.known(version, id, &requests);
        self.due.push_back((client, answer));
    }
}

fn is_far_enough(tokens: u64, from: u64) -> bool {
    from > 0 && tokens >= from
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::wire::Blocks;
    use crate::wire::limits::MAX_AWAITED;

    fn name(name: &str) -> RequestId {
        RequestId::new(name).unwrap()
    }

    fn prefill(request: &str) -> Prefill {
        Prefill {
            request: name(request),
            blocks: vec![Blocks::from(vec![1, 2])],
            tokens: 32,
            lease_ms: 1000,
            lease_id: 1,
        }
    }

    fn told(id: u64, ready: &[&str], gone: &[&str]) -> PrefillAnswer {
        PrefillAnswer {
            version: 4,
            id,
            ready: ready.iter().map(|r| prefill(r)).collect(),
            gone: gone.iter().map(|r| name(r)).collect(),
            partial: vec![],
        }
    }

    /// These names, to be told of when they are over.
    fn over(names: &[&str]) -> Vec<PrefillQuery> {
        names.iter().map(|r| (name(r), 0)).collect()
    }

    /// Nothing is remembered of questions.
    fn is_idle(prefills: &Prefills) -> bool {
        prefills.open_bytes == 0
            && prefills.open.is_empty()
            && prefills.clients.is_empty()
            && prefills.about.is_empty()
            && prefills.due.is_empty()
    }

    #[test]
    fn a_question_stays_open_until_one_of_its_prefills_is_over() {
        let mut prefills = Prefills::default();
        assert_eq!(prefills.ask(Some(b"x"), 4, 7, over(&["a", "b"])), None);
        assert_eq!(prefills.ask(Some(b"y"), 4, 8, over(&["b"])), None);
        prefills.ready(prefill("other"));
        assert_eq!(prefills.pop_due(), None);
        prefills.ready(prefill("b"));
        assert_eq!(prefills.pop_due(), Some((b"x".to_vec(), told(7, &["b"], &[]))));
        assert_eq!(prefills.pop_due(), Some((b"y".to_vec(), told(8, &["b"], &[]))));
        // What is known is told at once, as often as it is asked.
        assert_eq!(prefills.ask(Some(b"x"), 4, 9, over(&["a", "b"])), Some(told(9, &["b"], &[])));
        assert_eq!(prefills.ask(Some(b"x"), 4, 10, over(&["a"])), None);
        prefills.gone(name("a"));
        prefills.gone(name("b"));
        assert_eq!(prefills.pop_due(), Some((b"x".to_vec(), told(10, &[], &["a"]))));
        assert_eq!(prefills.ask(None, 4, 11, over(&["b", "c"])), Some(told(11, &[], &["b"])));
        assert_eq!(prefills.ask(None, 4, 12, over(&["c"])), Some(told(12, &[], &[])));
        // A name that is used again.
        prefills.ready(prefill("a"));
        assert_eq!(prefills.ask(Some(b"x"), 4, 13, over(&["a"])), Some(told(13, &["a"], &[])));
        assert!(is_idle(&prefills));
    }

    #[test]
    fn how_far_a_prefill_is_is_told_to_who_wants_to_know() {
        let mut prefills = Prefills::default();
        let at = |tokens: u64| Prefill { tokens, ..prefill("a") };
        let far = |id: u64, tokens: u64| PrefillAnswer { partial: vec![at(tokens)], ..told(id, &[], &[]) };
        assert_eq!(prefills.ask(Some(b"x"), 4, 1, vec![(name("a"), 10)]), None);
        assert_eq!(prefills.ask(Some(b"y"), 4, 2, over(&["a"])), None);
        prefills.set_written(at(9));
        assert_eq!(prefills.pop_due(), None);
        prefills.set_written(at(10));
        assert_eq!(prefills.pop_due(), Some((b"x".to_vec(), far(1, 10))));
        assert_eq!(prefills.pop_due(), None);
        // Between two questions it is still followed.
        assert!(prefills.is_followed(&name("a")) && !prefills.is_followed(&name("b")));
        assert_eq!(prefills.ask(None, 4, 3, vec![(name("a"), 10)]), Some(far(3, 10)));
        assert_eq!(prefills.ask(None, 4, 4, vec![(name("a"), 11)]), Some(told(4, &[], &[])));
        prefills.retract(&name("a"));
        assert_eq!(prefills.ask(None, 4, 5, vec![(name("a"), 1)]), Some(told(5, &[], &[])));
        prefills.set_written(at(3));
        prefills.ready(prefill("a"));
        // Too late.
        prefills.set_written(at(4));
        assert_eq!(prefills.ask(None, 4, 6, vec![(name("a"), 1)]), Some(told(6, &["a"], &[])));
        prefills.gone(name("a"));
        assert_eq!(prefills.pop_due(), Some((b"y".to_vec(), told(2, &["a"], &[]))));
        assert!(!prefills.is_followed(&name("a")) && prefills.partial.is_empty() && is_idle(&prefills));
        // A name that is used again while it is remembered as gone.
        prefills.set_written(at(3));
        assert_eq!(prefills.ask(None, 4, 7, vec![(name("a"), 1)]), Some(far(7, 3)));
        // Nobody makes a listener remember names without end.
        for number in 0..MAX_FOLLOWED + 5 {
            prefills.ask(None, 4, 8, vec![(name(&number.to_string()), 1)]);
        }
        assert_eq!(prefills.followed.len(), MAX_FOLLOWED);
    }

    #[test]
    fn who_asks_again_is_answered_twice() {
        let mut prefills = Prefills::default();
        assert_eq!(prefills.ask(Some(b"x"), 4, 1, over(&["a"])), None);
        assert_eq!(prefills.ask(Some(b"x"), 4, 2, over(&["a", "b"])), None);
        assert_eq!(prefills.pop_due(), Some((b"x".to_vec(), told(1, &[], &[]))));
        assert_eq!(prefills.pop_due(), None);
        prefills.ready(prefill("b"));
        assert_eq!(prefills.pop_due(), Some((b"x".to_vec(), told(2, &["b"], &[]))));
        assert!(is_idle(&prefills));
    }

    #[test]
    fn an_answer_holds_as_many_block_ids_as_a_reply_has_room_for() {
        let mut prefills = Prefills::default();
        let long = |request: &str, ids: usize| Prefill { blocks: vec![Blocks::from(vec![1; ids])], ..prefill(request) };
        let half = MAX_REPLY_BYTES / 8 / 2;
        for (request, ids) in [("a", half), ("b", half), ("c", 1), ("d", 3 * half)] {
            prefills.ready(long(request, ids));
        }
        let mut ready = |names: &[&str]| -> Vec<String> {
            let answer = prefills.ask(Some(b"x"), 4, 1, over(names)).unwrap();
            answer.ready.iter().map(|prefill| prefill.request.as_str().to_owned()).collect()
        };
        assert_eq!(ready(&["a", "b", "c"]), ["a", "b"]);
        assert_eq!(ready(&["c", "a", "b"]), ["c", "a"]);
        // One alone is told whatever its length.
        assert_eq!(ready(&["d", "c"]), ["d"]);
    }

    #[test]
    fn what_is_remembered_is_bounded_and_nobody_is_left_without_an_answer() {
        let mut prefills = Prefills::default();
        for client in 0..MAX_OPEN as u64 {
            assert_eq!(prefills.ask(Some(&client.to_le_bytes()), 4, client, over(&["a"])), None);
        }
        assert_eq!((prefills.open.len(), prefills.due.len()), (MAX_OPEN, 0));
        assert_eq!(prefills.ask(Some(b"one more"), 4, MAX_OPEN as u64, over(&["a"])), None);
        assert_eq!(prefills.open.len(), MAX_OPEN);
        assert_eq!(prefills.open_bytes, MAX_OPEN * 2 * (NAME_BYTES + 1));
        assert_eq!(prefills.pop_due(), Some((0u64.to_le_bytes().to_vec(), told(0, &[], &[]))));
        prefills.gone(name("a"));
        let mut answered = 0;
        while let Some((_, answer)) = prefills.pop_due() {
            answered += 1;
            assert_eq!(answer.gone, [name("a")]);
        }
        assert_eq!(answered, MAX_OPEN);
        for number in 0..MAX_GONE {
            prefills.gone(name(&number.to_string()));
        }
        assert_eq!(prefills.gone.len(), MAX_GONE);
        assert!(!prefills.gone.contains_key(&name("a")));
        // A name that is used again makes room for one, and the others are forgotten in their order.
        prefills.ready(prefill("5"));
        prefills.gone(name("5"));
        assert_eq!(prefills.gone.len(), MAX_GONE);
        prefills.gone(name("a"));
        assert!(!prefills.gone.contains_key(&name("0")) && prefills.gone.contains_key(&name("5")));
        assert!(is_idle(&prefills));
        // Questions about much take the place of many.
        let much: Vec<PrefillQuery> = (0..MAX_AWAITED).map(|n| (name(&format!("{n:0>512}")), 0)).collect();
        for client in 0..100u64 {
            assert_eq!(prefills.ask(Some(&client.to_le_bytes()), 4, client, much.clone()), None);
        }
        assert!(prefills.open_bytes <= MAX_OPEN_BYTES && prefills.open.len() > 40, "{}", prefills.open.len());
        assert_eq!(prefills.due.len() + prefills.open.len(), 100);
    }
}
