//! Releases that speak other protocol versions.

use kvferry_proto::ErrorKind;
use kvferry_proto::RequestId;
use kvferry_proto::handshake::{Directory, Pushes};
use kvferry_proto::wire::{self, Cause, HandshakeReply, HandshakeRequest, Message, RankMetadata, RefusalCode, kind};

use super::{LIFE, SHAPE, directory, engine, judge, metadata, query, ranks, refusal, says};

/// `message`, written in `version` by a side that speaks `speaks`; None for a build that does not tell.
fn sent_in(message: &HandshakeRequest, version: u16, speaks: Option<[u16; 2]>) -> Vec<u8> {
    #[derive(serde::Serialize)]
    struct Envelope<'a> {
        magic: &'a str,
        version: u16,
        #[serde(skip_serializing_if = "Option::is_none")]
        speaks: Option<[u16; 2]>,
        kind: &'a str,
        body: &'a HandshakeRequest,
    }
    let kind = kind::HANDSHAKE_REQUEST;
    rmp_serde::to_vec_named(&Envelope { magic: "kvferry", version, speaks, kind, body: message }).unwrap()
}

/// The version that a message is written in.
fn version_of(bytes: &[u8]) -> u16 {
    #[derive(serde::Deserialize)]
    struct Envelope {
        version: u16,
    }
    rmp_serde::from_slice::<Envelope>(bytes).unwrap().version
}

#[test]
fn two_neighbouring_versions_talk_in_the_newer_one_that_both_speak() {
    let asked = || HandshakeRequest::Query { id: 42, engine: Some(engine("p")), ranks: vec![] };
    let name = || RequestId::new("x").unwrap();
    let await_ =
        || HandshakeRequest::Await { id: 42, engine: engine("p"), requests: vec![name()], from_tokens: vec![] };
    // What the client sends first is read by the oldest listener.
    assert_eq!(version_of(&query(&[])), wire::OLDEST);
    for (version, speaks, answered_in) in
        [(4, None, 4), (4, Some([3, 4]), 4), (4, Some([4, 5]), 5), (5, Some([4, 5]), 5), (5, Some([5, 6]), 5)]
    {
        let mut directory = directory();
        let reply = directory.answer(&sent_in(&asked(), version, speaks));
        assert_eq!(version_of(&reply), answered_in, "{version}, {speaks:?}");
        assert_eq!(judge(HandshakeReply::from_bytes(&reply).unwrap()).unwrap().ranks.len(), 4);
        // Whoever reads it, ranks' metadata is encoded once.
        let HandshakeReply::Ranks { ranks, .. } = HandshakeReply::from_bytes(&reply).unwrap() else { panic!() };
        assert!(ranks.iter().all(|rank| version_of(&rank.metadata) == wire::OLDEST));
        // An answer that comes later, and a refusal.
        assert_eq!(directory.answer_to(b"x", &sent_in(&await_(), version, speaks)), None);
        directory.prefill_gone(name());
        assert_eq!(version_of(&directory.poll_answer().unwrap().1), answered_in);
        let wrong = HandshakeRequest::Query { id: 42, engine: Some(engine("q")), ranks: vec![] };
        assert_eq!(version_of(&directory.answer(&sent_in(&wrong, version, speaks))), answered_in);
    }
}

#[test]
fn versions_that_are_not_neighbours_are_refused_with_both_ranges() {
    let asked = HandshakeRequest::Query { id: 42, engine: None, ranks: vec![] };
    for (version, speaks, theirs, answered_in) in [
        (3, None, "its sender speaks version 3,", 4),
        (3, Some([2, 3]), "its sender speaks versions 2 to 3,", 4),
        (6, Some([6, 7]), "its sender speaks versions 6 to 7,", 5),
        (0, None, "its sender speaks version 0,", 4),
    ] {
        let reply = directory().answer(&sent_in(&asked, version, speaks));
        let (id, code, text) = refusal(&reply);
        assert_eq!((id, code, version_of(&reply)), (0, RefusalCode::Version, answered_in));
        says(&text, &[&format!("protocol version {version} arrived"), theirs, "this build versions 4 to 5"]);
        says(&text, &["upgrade the older side, one protocol version at a time", "docs/guide.md"]);
        // The reply of such a listener, and its refusal.
        let mut reply = directory().answer(&query(&[]));
        let at = reply.windows(7).position(|w| w == b"version").unwrap() + 7;
        reply[at] = version as u8;
        let error = HandshakeReply::from_bytes(&reply).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::VersionMismatch);
        says(error.message(), &["this build versions 4 to 5", "upgrade the older side"]);
        let refused = HandshakeReply::Refused { id: 0, code: RefusalCode::Version, message: text };
        let failure = judge(refused).unwrap_err();
        assert_eq!(failure.cause, Cause::Incompatible);
    }
}

#[test]
fn one_engine_is_of_one_release() {
    let rank = ranks()[0];
    let bytes = metadata("p", rank).to_bytes().unwrap();
    let at = bytes.windows(7).position(|w| w == b"\xa6speaks").unwrap();
    assert_eq!(bytes[at + 7..at + 10], [0x92, wire::OLDEST as u8, wire::VERSION as u8]);
    // As a build of version 4 writes it.
    let older = [&[0x84], &bytes[1..at], &bytes[at + 10..]].concat();
    assert_eq!(RankMetadata::from_bytes(&older).unwrap(), metadata("p", rank));
    let mut newer = bytes.clone();
    (newer[at + 8], newer[at + 9]) = (5, 6);
    for (other, speaks) in [(older, "version 4"), (newer, "versions 4 to 6")] {
        let mut directory = Directory::new(engine("p"), LIFE, SHAPE, Pushes::Refused).unwrap();
        let error = directory.offer(other).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Incompatible);
        says(error.message(), &[&format!("speaks protocol {speaks}, its scheduler side versions 4 to 5")]);
        says(error.message(), &["need the same kvferry release"]);
        assert_eq!(directory.missing(), 4);
    }
}
