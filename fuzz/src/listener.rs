//! The listener's answering function: any requests in any order get a reply each that decodes, and rank metadata that
//! was taken once is served unchanged.

use std::collections::{HashMap, HashSet};

use kvferry::proto::handshake::{Directory, Pushes};
use kvferry::proto::ids::{Incarnation, RankId};
use kvferry::proto::wire::{
    EngineShape, HandshakeReply, HandshakeRequest, Message, Prefill, RankMetadata, RefusalCode, limits::MAX_RANKS,
};
use serde_bytes::ByteBuf;

use super::Source;
use super::machines::rank;

fn metadata(source: &mut Source, shape: EngineShape) -> RankMetadata {
    let mut metadata = rank::metadata(rank::engine("p"), 5, 16);
    metadata.shape = shape;
    metadata.rank = RankId { pp: 0, tp: source.below(4) as u32 };
    if source.rarely(8) {
        metadata.engine = rank::engine("other");
    }
    if source.rarely(8) {
        metadata.shape.tp += 1;
    }
    if source.rarely(8) {
        metadata.agent.incarnation = Incarnation(source.number());
    }
    metadata
}

/// Takes the answers that came later.
fn take_answers(directory: &mut Directory, open: &mut HashMap<u64, Vec<u8>>) {
    while let Some((client, reply)) = directory.poll_answer() {
        let HandshakeReply::Prefills { id, .. } = HandshakeReply::from_bytes(&reply).unwrap() else {
            panic!("a question about prefills is answered with something else")
        };
        assert_eq!(open.remove(&id), Some(client), "one answer for a question, to its client");
    }
    let clients: HashSet<&Vec<u8>> = open.values().collect();
    assert_eq!(clients.len(), open.len(), "one open question for a client");
}

/// A sequence of requests.
pub fn run(data: &[u8]) {
    let mut source = Source::new(data);
    let shape = EngineShape { tp: 1 + source.below(3) as u32, pp: 1, dcp: 1 };
    let pushes = if source.flag() { Pushes::Accepted } else { Pushes::Refused };
    let mut directory = Directory::new(rank::engine("p"), Incarnation(3), shape, pushes).unwrap();
    // Questions without an answer, and who asked.
    let mut open: HashMap<u64, Vec<u8>> = HashMap::new();
    let mut served: Vec<Option<Vec<u8>>> = vec![None; shape.tp as usize];
    for number in 1..64 {
        if source.is_empty() {
            break;
        }
        let (id, request) = match source.below(7) {
            0 => {
                let len = usize::from(source.short());
                (None, source.bytes(len).to_vec())
            }
            1 => {
                let metadata = metadata(&mut source, shape);
                let bytes = metadata.to_bytes().unwrap();
                if let Ok(rank) = directory.offer(bytes.clone()) {
                    let known = served[rank.tp as usize].get_or_insert(bytes.clone());
                    assert_eq!(*known, bytes, "metadata that was taken once stays");
                }
                continue;
            }
            2 => {
                let bytes = metadata(&mut source, shape).to_bytes().unwrap();
                let expected = if source.rarely(4) { source.number() as u32 } else { shape.ranks() };
                let push = HandshakeRequest::Push { id: number, expected, metadata: ByteBuf::from(bytes.clone()) };
                let reply = HandshakeReply::from_bytes(&directory.answer(&push.to_bytes().unwrap())).unwrap();
                match reply {
                    HandshakeReply::Pushed { id, missing } => {
                        assert_eq!(id, number);
                        assert!(pushes == Pushes::Accepted && missing == directory.missing());
                        let rank = RankMetadata::from_bytes(&bytes).unwrap().rank;
                        let known = served[rank.tp as usize].get_or_insert(bytes.clone());
                        assert_eq!(*known, bytes, "metadata that was taken once stays");
                    }
                    HandshakeReply::Refused { id, code, .. } => {
                        assert_eq!((id, code), (number, RefusalCode::Push));
                    }
                    other => panic!("a push is answered with {other:?}"),
                }
                continue;
            }
            3 => {
                let count = if source.rarely(16) { usize::from(source.short()) % (MAX_RANKS as usize) } else { 3 };
                let ranks = (0..count).map(|_| RankId { pp: 0, tp: source.below(4) as u32 }).collect();
                let engine = rank::engine(if source.rarely(8) { "other" } else { "p" });
                let query = HandshakeRequest::Query { id: number, engine: Some(engine), ranks };
                (Some(number), query.to_bytes().unwrap())
            }
            4 => {
                let request = rank::request(format!("x{}", source.below(4)));
                let blocks = vec![vec![source.below(9) as u32].into()];
                let tokens = source.below(9) as u64;
                let prefill = Prefill { request: request.clone(), blocks, tokens, lease_ms: 1, lease_id: number };
                match source.below(4) {
                    0 => directory.prefill_gone(request),
                    1 => directory.prefilled(prefill),
                    2 => directory.prefill_progressed(prefill),
                    _ => directory.prefill_retracted(&request),
                }
                take_answers(&mut directory, &mut open);
                continue;
            }
            5 => {
                let client = vec![source.below(3) as u8];
                let requests = (0..source.below(4)).map(|_| rank::request(format!("x{}", source.below(4)))).collect();
                let from_tokens = (0..source.below(5)).map(|_| source.below(9) as u64).collect();
                let ask = HandshakeRequest::Await { id: number, engine: rank::engine("p"), requests, from_tokens };
                if let Some(reply) = directory.answer_to(&client, &ask.to_bytes().unwrap()) {
                    let reply = HandshakeReply::from_bytes(&reply).unwrap();
                    assert!(matches!(reply, HandshakeReply::Prefills { id, .. } if id == number), "{reply:?}");
                } else {
                    open.insert(number, client);
                }
                take_answers(&mut directory, &mut open);
                continue;
            }
            // A good query with some bytes changed.
            _ => {
                let query = HandshakeRequest::Query { id: number, engine: None, ranks: vec![] };
                let mut bytes = query.to_bytes().unwrap();
                for _ in 0..source.below(4) {
                    let at = source.below(bytes.len());
                    bytes[at] = source.byte();
                }
                (None, bytes)
            }
        };
        let reply = directory.answer(&request);
        match HandshakeReply::from_bytes(&reply).expect("every request gets a reply that decodes") {
            HandshakeReply::Ranks { id: echoed, ranks, .. } => {
                assert!(directory.is_ready() && id.is_none_or(|id| id == echoed));
                for blob in ranks {
                    assert_eq!(served[blob.rank.tp as usize].as_deref(), Some(&blob.metadata[..]));
                }
            }
            HandshakeReply::Refused { id: echoed, .. } => assert!(id.is_none_or(|id| id == echoed)),
            HandshakeReply::Pushed { .. } => assert_eq!(pushes, Pushes::Accepted),
            HandshakeReply::Prefills { .. } => {}
        }
    }
    assert_eq!(directory.missing() as usize, served.iter().filter(|bytes| bytes.is_none()).count());
}
