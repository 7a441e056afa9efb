//! What the client makes of a reply.

use std::sync::Arc;

use kvferry_proto::geometry::GroupKind;
use kvferry_proto::handshake::{HandshakeCheck, HandshakeFailure, HandshakeOutcome};
use kvferry_proto::wire::{
    self, Cause, CompatField, HandshakeReply, Message, RankBlob, RankMetadata, RefusalCode, kind,
};
use kvferry_proto::{Incarnation, RankId};
use serde_bytes::ByteBuf;

use super::{LIFE, SHAPE, engine, judge, metadata, says};

/// What rank (1, 0) of `d`, changed by `local`, makes of the ranks of `p`, changed by `remote`.
fn judged_by(
    local: &dyn Fn(&mut RankMetadata),
    remote: &dyn Fn(&mut RankMetadata),
) -> Result<HandshakeOutcome, HandshakeFailure> {
    let changed = |name: &str, rank: RankId, change: &dyn Fn(&mut RankMetadata)| {
        let mut m = metadata(name, rank);
        change(&mut m);
        m
    };
    let here = changed("d", RankId { pp: 1, tp: 0 }, local);
    let shape = changed("p", RankId { pp: 0, tp: 0 }, remote).shape;
    let blob = |rank| RankBlob { rank, metadata: ByteBuf::from(changed("p", rank, remote).to_bytes().unwrap()) };
    let ranks = shape.rank_ids().map(blob).collect();
    let reply = HandshakeReply::Ranks { id: 42, engine: engine("p"), incarnation: LIFE, shape, ranks };
    HandshakeCheck::new(Arc::new(here), 42, engine("p"), Some(LIFE)).judge(reply)
}

fn judged(change: &dyn Fn(&mut RankMetadata)) -> Result<HandshakeOutcome, HandshakeFailure> {
    judged_by(&|_| (), change)
}

#[test]
fn incompatible_engines_learn_which_field_differs_and_both_values() {
    let incompatible = |change: &dyn Fn(&mut RankMetadata), parts: &[&str]| {
        let failure = judged(change).unwrap_err();
        assert!(failure.cause == Cause::Incompatible, "{failure:?}");
        says(&failure.message, parts);
    };
    assert!(judged(&|_| ()).is_ok());
    // Order does not matter.
    assert!(judged(&|m| m.compat.reverse()).is_ok());
    incompatible(
        &|m| m.compat[0].value = "other".into(),
        &["engine p rank (pp 0, tp 0)", "\"model\" differs", "\"tiny\" here", "\"other\" there", "same model"],
    );
    incompatible(&|m| m.compat.truncate(1), &["\"cache_dtype\" differs", "\"float32\" here", "missing there"]);
    incompatible(
        &|m| m.compat.push(CompatField { name: "extra".into(), value: "x".into(), informative: true }),
        &["\"extra\" differs", "missing here", "\"x\" there"],
    );
    incompatible(&|m| m.geometry.areas[0].total_heads = 4, &["number of KV heads of the model", "2 here", "4 on"]);
    incompatible(&|m| m.geometry.areas[0].content = 32, &["bytes per token and head", "64 here", "32 on"]);
    incompatible(&|m| m.geometry.groups[0].kind = GroupKind::Latent, &["kind of cache", "full here", "latent on"]);
    let whole = |m: &mut RankMetadata| {
        m.geometry.groups[0].block_size = 32;
        (m.geometry.areas[0].tokens, m.geometry.areas[0].content) = (1, 1024);
    };
    incompatible(&whole, &["block size", "16 here", "32 on", "attention backend"]);
    // Shapes and block sizes may differ.
    assert!(judged(&|m| m.shape.tp = 1).is_ok());
    assert!(judged(&|m| (m.geometry.groups[0].block_size, m.geometry.areas[0].tokens) = (8, 8)).is_ok());
    incompatible(&|m| m.geometry.areas[0].part = "k".into(), &["layout", "kv here", "k on"]);
}

#[test]
fn formats_are_compared_by_layer_where_both_state_them() {
    let format = |text: &'static str| move |m: &mut RankMetadata| m.geometry.areas[0].format = text.into();
    assert!(judged_by(&format("bfloat16"), &format("bfloat16")).is_ok());
    let failure = judged_by(&format("bfloat16"), &format("float16 TRITON")).unwrap_err();
    assert_eq!(failure.cause, Cause::Incompatible);
    let parts = ["format of layer \"layers.1\"", "\"bfloat16\" here", "\"float16 TRITON\" on", "attention backend"];
    says(&failure.message, &parts);
    // An earlier release states none.
    assert!(judged_by(&format("bfloat16"), &|_| ()).is_ok());
    assert!(judged_by(&|_| (), &format("bfloat16")).is_ok());
}

#[test]
fn a_field_that_both_call_informative_is_told_and_not_compared() {
    let field = |value: &'static str, informative| {
        move |m: &mut RankMetadata| m.compat.push(CompatField { name: "vllm".into(), value: value.into(), informative })
    };
    assert_eq!(judged_by(&field("0.32", true), &field("0.32", true)).unwrap().notes, [""; 0]);
    let outcome = judged_by(&field("0.32", true), &field("0.33", true)).unwrap();
    assert_eq!(outcome.notes, ["vllm differs: \"0.32\" here, \"0.33\" there"]);
    // An earlier release leaves it at that one value.
    for (ours, theirs) in [(true, false), (false, true), (false, false)] {
        let failure = judged_by(&field("0.32", ours), &field("0.33", theirs)).unwrap_err();
        says(&failure.message, &["\"vllm\" differs", "\"0.32\" here", "\"0.33\" there", "same vllm"]);
    }
}

#[test]
fn heads_whose_copies_nobody_knows_need_equal_numbers_of_ranks() {
    let by_rank = |total: u32| {
        move |m: &mut RankMetadata| {
            let area = &mut m.geometry.areas[0];
            (area.total_heads, area.heads_by_rank) = (total, true);
        }
    };
    assert!(judged_by(&by_rank(2), &by_rank(2)).is_ok());
    assert!(judged_by(&|_| (), &by_rank(2)).is_ok());
    for (ours, theirs) in [(2, 4), (4, 2)] {
        let failure = judged_by(&by_rank(ours), &by_rank(theirs)).unwrap_err();
        assert_eq!(failure.cause, Cause::Incompatible);
        let shards = [format!("{ours} shards here"), format!("{theirs} on the other side")];
        says(&failure.message, &["layer \"layers.1\"", &shards[0], &shards[1], "same --tensor-parallel-size"]);
    }
}

#[test]
fn replies_that_do_not_answer_the_query_are_failures() {
    let rank = RankId { pp: 1, tp: 0 };
    let blob = |name: &str, rank: RankId, of: RankId| RankBlob {
        rank,
        metadata: ByteBuf::from(metadata(name, of).to_bytes().unwrap()),
    };
    let wrong = |id: u64, name: &str, incarnation: Incarnation, ranks: Vec<RankBlob>| {
        judge(HandshakeReply::Ranks { id, engine: engine(name), incarnation, shape: SHAPE, ranks }).unwrap_err()
    };
    let mine = || vec![blob("p", rank, rank)];
    let failed = |failure: HandshakeFailure, cause: Cause, parts: &[&str]| {
        assert!(failure.cause == cause, "{failure:?}");
        says(&failure.message, parts);
    };
    let bad = Cause::HandshakeFailed;
    failed(wrong(41, "p", LIFE, mine()), bad, &["query 42", "query 41"]);
    failed(wrong(42, "q", LIFE, mine()), bad, &["\"p\" was expected", "\"q\" answered"]);
    failed(
        wrong(42, "p", Incarnation(1), mine()),
        Cause::PeerDied,
        &["restarted since", "0000000000000abc expected", "0000000000000001 found", "prefill the request again"],
    );
    failed(wrong(42, "p", LIFE, vec![]), bad, &["has 4 ranks, its listener gave 0"]);
    failed(wrong(42, "p", LIFE, mine()), bad, &["has 4 ranks, its listener gave 1"]);
    failed(wrong(42, "p", LIFE, vec![mine().remove(0), mine().remove(0)]), bad, &["twice"]);
    failed(
        wrong(42, "p", LIFE, vec![blob("p", rank, RankId { pp: 0, tp: 0 })]),
        bad,
        &["(pp 0, tp 0)", "as that of rank (pp 1, tp 0)"],
    );
    failed(wrong(42, "p", LIFE, vec![blob("q", rank, rank)]), bad, &["of engine q"]);
    let damaged = vec![RankBlob { rank, metadata: ByteBuf::from(vec![1, 2, 3]) }];
    failed(wrong(42, "p", LIFE, damaged), bad, &["not a kvferry message"]);
    let reply = HandshakeReply::Pushed { id: 42, missing: 0 };
    failed(judge(reply).unwrap_err(), bad, &["something else"]);
    let refused = |id, code| judge(HandshakeReply::Refused { id, code, message: "why".into() }).unwrap_err();
    failed(refused(42, RefusalCode::UnknownRank), bad, &["refused: why"]);
    failed(refused(0, RefusalCode::Malformed), bad, &["refused: why"]);
    failed(refused(0, RefusalCode::Version), Cause::Incompatible, &["refused: why"]);
    failed(refused(41, RefusalCode::UnknownRank), bad, &["query 41"]);
    failed(refused(42, RefusalCode::NotReady), bad, &["refused: why"]);
}

#[test]
fn a_refusal_for_a_reason_of_a_newer_release_is_still_a_refusal() {
    #[derive(serde::Serialize)]
    #[serde(rename_all = "snake_case")]
    enum Newer {
        Refused { id: u64, code: &'static str, message: &'static str, since: u32 },
    }
    let reply = Newer::Refused { id: 42, code: "overloaded", message: "come back later", since: 3 };
    let bytes = wire::encode(kind::HANDSHAKE_REPLY, wire::VERSION, &reply).unwrap();
    let failure = judge(HandshakeReply::from_bytes(&bytes).unwrap()).unwrap_err();
    says(&failure.message, &["come back later"]);
}
