//! Prefills that clients await: those that are over, and who is to be told of the others.
//!
//! A client has one question open at a time, about all that it awaits. When it asks again the older question is answered
//! with nothing, so every question gets exactly one answer, and a client that is gone leaves one behind.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};

use crate::proto::ids::RequestId;
use crate::proto::wire::Prefill;
use crate::proto::wire::limits::MAX_REPLY_BYTES;

/// Open questions; the oldest makes room, and its client asks again.
const MAX_OPEN: usize = 4096;
/// The names in open questions, in bytes, each with what it takes to remember it; the oldest question makes room.
const MAX_OPEN_BYTES: usize = 64 << 20;
/// What a name in an open question takes beside its text, twice: about.
const NAME_BYTES: usize = 100;
/// Prefills that are remembered as gone; the oldest makes room. As many as a worker's tombstones by default.
const MAX_GONE: usize = 16_384;
/// Block ids in one answer. What is left goes with the next.
const MAX_IDS: usize = MAX_REPLY_BYTES / 2 / size_of::<u32>();

/// Names a client for as long as it is connected.
pub type Asker = Vec<u8>;

/// What a question is answered with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Told {
    /// The protocol version to answer in.
    pub(super) version: u16,
    pub(super) id: u64,
    pub(super) ready: Vec<Prefill>,
    pub(super) gone: Vec<RequestId>,
}

#[derive(Debug, Clone)]
struct Open {
    asker: Asker,
    version: u16,
    id: u64,
    requests: Vec<RequestId>,
}

impl Open {
    fn bytes(&self) -> usize {
        self.requests.iter().map(|name| name.as_str().len().saturating_add(NAME_BYTES).saturating_mul(2)).sum()
    }
}

#[derive(Debug, Clone, Default)]
pub(super) struct Prefills {
    ready: HashMap<RequestId, Prefill>,
    gone: HashSet<RequestId>,
    gone_order: VecDeque<RequestId>,
    /// From the oldest on.
    open: BTreeMap<u64, Open>,
    /// What their names take.
    open_bytes: usize,
    askers: HashMap<Asker, u64>,
    /// Which questions are about a prefill.
    about: HashMap<RequestId, BTreeSet<u64>>,
    due: VecDeque<(Asker, Told)>,
    next: u64,
}

impl Prefills {
    /// What is known of these prefills. With nothing known yet and an `asker`, the question stays open and is answered by
    /// [`Prefills::pop_due`].
    pub(super) fn ask(
        &mut self,
        asker: Option<&[u8]>,
        version: u16,
        id: u64,
        requests: Vec<RequestId>,
    ) -> Option<Told> {
        if let Some(asker) = asker
            && let Some(older) = self.askers.remove(asker)
        {
            self.answer(older);
        }
        let told = self.known(version, id, &requests);
        let Some(asker) = asker else { return Some(told) };
        if !told.ready.is_empty() || !told.gone.is_empty() || requests.is_empty() {
            return Some(told);
        }
        self.next += 1;
        for request in &requests {
            self.about.entry(request.clone()).or_default().insert(self.next);
        }
        self.askers.insert(asker.to_owned(), self.next);
        let open = Open { asker: asker.to_owned(), version, id, requests };
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
        if self.gone.remove(&request) {
            self.gone_order.retain(|gone| *gone != request);
        }
        self.ready.insert(request.clone(), prefill);
        self.tell(&request);
    }

    /// Nothing is kept of a prefill (any more).
    pub(super) fn gone(&mut self, request: RequestId) {
        self.ready.remove(&request);
        if self.gone.insert(request.clone()) {
            self.gone_order.push_back(request.clone());
        }
        if self.gone_order.len() > MAX_GONE
            && let Some(oldest) = self.gone_order.pop_front()
        {
            self.gone.remove(&oldest);
        }
        self.tell(&request);
    }

    /// The next answer to a question that was left open.
    pub(super) fn pop_due(&mut self) -> Option<(Asker, Told)> {
        self.due.pop_front()
    }

    fn known(&self, version: u16, id: u64, requests: &[RequestId]) -> Told {
        let mut told = Told { version, id, ready: Vec::new(), gone: Vec::new() };
        let mut ids = 0usize;
        for request in requests {
            if let Some(prefill) = self.ready.get(request) {
                ids = prefill.blocks.iter().fold(ids, |sum, blocks| sum.saturating_add(blocks.len()));
                if told.ready.is_empty() || ids <= MAX_IDS {
                    told.ready.push(prefill.clone());
                }
            } else if self.gone.contains(request) {
                told.gone.push(request.clone());
            }
        }
        told
    }

    fn tell(&mut self, request: &RequestId) {
        for question in self.about.get(request).cloned().unwrap_or_default() {
            self.answer(question);
        }
    }

    /// Answers an open question with what is known.
    fn answer(&mut self, question: u64) {
        let Some(open) = self.open.remove(&question) else { return };
        self.open_bytes = self.open_bytes.saturating_sub(open.bytes());
        let Open { asker, version, id, requests } = open;
        if self.askers.get(&asker) == Some(&question) {
            self.askers.remove(&asker);
        }
        for request in &requests {
            if let Some(about) = self.about.get_mut(request) {
                about.remove(&question);
                if about.is_empty() {
                    self.about.remove(request);
                }
            }
        }
        let told = self.known(version, id, &requests);
        self.due.push_back((asker, told));
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::proto::wire::Blocks;
    use crate::proto::wire::limits::MAX_AWAITED;

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

    fn told(id: u64, ready: &[&str], gone: &[&str]) -> Told {
        Told {
            version: 4,
            id,
            ready: ready.iter().map(|r| prefill(r)).collect(),
            gone: gone.iter().map(|r| name(r)).collect(),
        }
    }

    /// Nothing is remembered of questions.
    fn is_idle(prefills: &Prefills) -> bool {
        prefills.open_bytes == 0
            && prefills.open.is_empty()
            && prefills.askers.is_empty()
            && prefills.about.is_empty()
            && prefills.due.is_empty()
    }

    #[test]
    fn a_question_stays_open_until_one_of_its_prefills_is_over() {
        let mut prefills = Prefills::default();
        assert_eq!(prefills.ask(Some(b"x"), 4, 7, vec![name("a"), name("b")]), None);
        assert_eq!(prefills.ask(Some(b"y"), 4, 8, vec![name("b")]), None);
        prefills.ready(prefill("other"));
        assert_eq!(prefills.pop_due(), None);
        prefills.ready(prefill("b"));
        assert_eq!(prefills.pop_due(), Some((b"x".to_vec(), told(7, &["b"], &[]))));
        assert_eq!(prefills.pop_due(), Some((b"y".to_vec(), told(8, &["b"], &[]))));
        // What is known is told at once, as often as it is asked.
        assert_eq!(prefills.ask(Some(b"x"), 4, 9, vec![name("a"), name("b")]), Some(told(9, &["b"], &[])));
        assert_eq!(prefills.ask(Some(b"x"), 4, 10, vec![name("a")]), None);
        prefills.gone(name("a"));
        prefills.gone(name("b"));
        assert_eq!(prefills.pop_due(), Some((b"x".to_vec(), told(10, &[], &["a"]))));
        assert_eq!(prefills.ask(None, 4, 11, vec![name("b"), name("c")]), Some(told(11, &[], &["b"])));
        assert_eq!(prefills.ask(None, 4, 12, vec![name("c")]), Some(told(12, &[], &[])));
        // A name that is used again.
        prefills.ready(prefill("a"));
        assert_eq!(prefills.ask(Some(b"x"), 4, 13, vec![name("a")]), Some(told(13, &["a"], &[])));
        assert!(is_idle(&prefills));
    }

    #[test]
    fn who_asks_again_is_answered_twice() {
        let mut prefills = Prefills::default();
        assert_eq!(prefills.ask(Some(b"x"), 4, 1, vec![name("a")]), None);
        assert_eq!(prefills.ask(Some(b"x"), 4, 2, vec![name("a"), name("b")]), None);
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
        let mut ready = |asked: &[&str]| -> Vec<String> {
            let told = prefills.ask(Some(b"x"), 4, 1, asked.iter().map(|r| name(r)).collect()).unwrap();
            told.ready.iter().map(|prefill| prefill.request.as_str().to_owned()).collect()
        };
        assert_eq!(ready(&["a", "b", "c"]), ["a", "b"]);
        assert_eq!(ready(&["c", "a", "b"]), ["c", "a"]);
        // One alone is told whatever its length.
        assert_eq!(ready(&["d", "c"]), ["d"]);
    }

    #[test]
    fn what_is_remembered_is_bounded_and_nobody_is_left_without_an_answer() {
        let mut prefills = Prefills::default();
        for asker in 0..MAX_OPEN as u64 {
            assert_eq!(prefills.ask(Some(&asker.to_le_bytes()), 4, asker, vec![name("a")]), None);
        }
        assert_eq!((prefills.open.len(), prefills.due.len()), (MAX_OPEN, 0));
        assert_eq!(prefills.ask(Some(b"one more"), 4, MAX_OPEN as u64, vec![name("a")]), None);
        assert_eq!(prefills.open.len(), MAX_OPEN);
        assert_eq!(prefills.open_bytes, MAX_OPEN * 2 * (NAME_BYTES + 1));
        assert_eq!(prefills.pop_due(), Some((0u64.to_le_bytes().to_vec(), told(0, &[], &[]))));
        prefills.gone(name("a"));
        let mut answered = 0;
        while let Some((_, told)) = prefills.pop_due() {
            answered += 1;
            assert_eq!(told.gone, [name("a")]);
        }
        assert_eq!(answered, MAX_OPEN);
        for number in 0..MAX_GONE {
            prefills.gone(name(&number.to_string()));
        }
        assert_eq!((prefills.gone.len(), prefills.gone_order.len()), (MAX_GONE, MAX_GONE));
        assert!(!prefills.gone.contains(&name("a")));
        // A name that is used again makes room for one, and the others are forgotten in their order.
        prefills.ready(prefill("5"));
        prefills.gone(name("5"));
        assert_eq!((prefills.gone.len(), prefills.gone_order.len()), (MAX_GONE, MAX_GONE));
        prefills.gone(name("a"));
        assert!(!prefills.gone.contains(&name("0")) && prefills.gone.contains(&name("5")));
        assert!(is_idle(&prefills));
        // Questions about much take the place of many.
        let much: Vec<RequestId> = (0..MAX_AWAITED).map(|n| name(&format!("{n:0>512}"))).collect();
        for asker in 0..100u64 {
            assert_eq!(prefills.ask(Some(&asker.to_le_bytes()), 4, asker, much.clone()), None);
        }
        assert!(prefills.open_bytes <= MAX_OPEN_BYTES && prefills.open.len() > 40, "{}", prefills.open.len());
        assert_eq!(prefills.due.len() + prefills.open.len(), 100);
    }
}
