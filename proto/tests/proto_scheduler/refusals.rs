//! Input that cannot be used.

use super::*;

#[test]
fn params_that_cannot_be_used_name_the_key() {
    type Change = fn(&mut TransferParams);
    let cases: [(&str, Change); 18] = [
        ("remote_engine_id", |p| p.remote_engine_id = None),
        ("remote_engine_id", |p| p.remote_engine_id = Some(String::new())),
        ("remote_request_id", |p| p.remote_request_id = None),
        ("remote_request_id", |p| p.remote_request_id = Some("x".repeat(10_000))),
        ("remote_host", |p| p.remote_host = None),
        ("remote_host", |p| p.remote_host = Some(String::new())),
        ("remote_port", |p| p.remote_port = None),
        ("remote_port", |p| p.remote_port = Some(0)),
        ("remote_port", |p| p.remote_port = Some(70_000)),
        ("remote_block_ids", |p| p.remote_block_ids = None),
        ("remote_lease_ms", |p| p.remote_lease_ms = Some(-1)),
        ("remote_lease_id", |p| p.remote_lease_id = Some(0)),
        ("remote_incarnation", |p| p.remote_incarnation = Some("abc".into())),
        ("remote_incarnation", |p| p.remote_incarnation = Some("+00000000000001f".into())),
        ("remote_incarnation", |p| p.remote_incarnation = Some("0000000000000000".into())),
        ("transfer_mode", |p| p.transfer_mode = Some("push".into())),
        ("do_remote_decode", |p| p.do_remote_decode = true),
        ("do_remote_prefill", |p| p.do_remote_decode = true),
    ];
    for (key, change) in cases {
        let mut s = scheduler();
        let mut params = offered();
        change(&mut params);
        for e in [
            s.arrived(&id("d"), &params).unwrap_err(),
            s.matched(&id("d"), &params, 18, 0).unwrap_err(),
            s.allocated(&id("d"), &params, lists(&[1], &[1]), 18, 4).unwrap_err(),
        ] {
            assert_eq!(e.kind(), ErrorKind::InvalidArgument);
            assert!(e.message().contains(key) && e.message().contains("request d"), "{key}: {e}");
        }
        assert!(!s.has_pending() && s.receiving() == 0);
    }
    let nothing = TransferParams { do_remote_prefill: true, ..Default::default() };
    let e = scheduler().arrived(&id("d"), &nothing).unwrap_err();
    assert!(e.message().contains("remote_engine_id, remote_request_id, remote_host, remote_port, remote_block_ids"));
    assert!(e.message().contains("proxy must pass on"), "{e}");
}

#[test]
fn a_prompt_that_the_producer_does_not_hold_is_refused() {
    type Change = fn(&mut TransferParams);
    let cases: [(&str, Change); 5] = [
        ("remote_num_tokens: the producer holds 17 tokens", |p| p.remote_num_tokens = Some(17)),
        ("remote_num_tokens: expected 0 or more", |p| p.remote_num_tokens = Some(-18)),
        ("one list for each of the producer's KV-cache groups", |p| p.remote_block_ids = Some(vec![])),
        ("remote_block_ids[1][0]: expected a block id", |p| p.remote_block_ids = Some(vec![vec![1; 5], vec![-2]])),
        ("remote_block_ids[0][4]", |p| p.remote_block_ids = Some(vec![vec![1, 2, 3, 4, 1 << 32], vec![5]])),
    ];
    for (words, change) in cases {
        let mut params = offered();
        change(&mut params);
        let e = scheduler().matched(&id("d"), &params, 18, 0).unwrap_err();
        assert!(e.message().contains(words), "{e}");
    }
    let mut unsaid = offered();
    unsaid.remote_num_tokens = None;
    assert_eq!(scheduler().matched(&id("d"), &unsaid, 18, 0).unwrap().tokens, 18);
    unsaid.remote_num_tokens = Some(20);
    assert_eq!(scheduler().matched(&id("d"), &unsaid, 18, 0).unwrap().tokens, 18, "it may hold more");
}

#[test]
fn more_block_ids_than_a_prompt_can_have_are_refused() {
    let many = MAX_BLOCK_IDS + 1;
    for (lists_of_ids, tokens, words) in [
        (vec![vec![0; many - 1], vec![]], 18, "remote_block_ids[0]: 4194304 block ids for 18 tokens"),
        (vec![vec![0; many], vec![]], 18, "remote_block_ids: 4194305 block ids, at most 4194304 can be"),
        (vec![vec![11; 18], vec![0; 19]], 18, "remote_block_ids[1]: 19 block ids for 18 tokens"),
        (vec![vec![0; many], vec![23]], i64::MAX, "remote_block_ids: 4194306 block ids, at most 4194304 can be"),
        (vec![vec![0; many / 2 + 1]; 2], 1 << 40, "remote_block_ids: 4194306 block ids, at most 4194304 can be"),
    ] {
        let params =
            TransferParams { remote_block_ids: Some(lists_of_ids), remote_num_tokens: Some(tokens), ..offered() };
        let mut s = scheduler();
        let e = s.matched(&id("d"), &params, 18, 0).expect_err(words);
        assert!(e.message().contains(words), "{e}");
        let local = lists(&[1, 2, 3, 4, 5], &[6, 7, 8]);
        assert_eq!(s.allocated(&id("d"), &params, local, 18, 18).unwrap_err(), e);
        assert!(!s.has_pending() && s.receiving() == 0);
    }
    let e = scheduler().allocated(&id("d"), &offered(), vec![vec![1; many].into(), Blocks::default()], 18, 18);
    assert!(e.unwrap_err().message().contains("4194305 blocks are to be filled, at most 4194304 can be"));
}

#[test]
fn texts_from_outside_are_cut_in_errors() {
    type Change = fn(&mut TransferParams);
    let cases: [Change; 2] =
        [|p| p.transfer_mode = Some("\u{fffd}".repeat(1 << 20)), |p| p.remote_incarnation = Some("f".repeat(1 << 20))];
    for change in cases {
        let mut params = offered();
        change(&mut params);
        let e = scheduler().arrived(&id("d"), &params).unwrap_err();
        assert!(e.message().len() < 1000, "{} bytes", e.message().len());
    }
}

#[test]
fn settings_that_cannot_work_are_named() {
    type Change = fn(&mut SchedulerMachineConfig);
    let cases: [(&str, Change); 6] = [
        ("tp_size", |c| c.tp_size = 0),
        ("lease_ms", |c| c.lease_ms = 999),
        ("incarnation", |c| c.incarnation = Incarnation(0)),
        ("groups", |c| c.groups.clear()),
        ("groups[0].block_size", |c| c.groups[0].block_size = 0),
        ("groups[1].kind", |c| c.groups[1].kind = GroupKind::SlidingWindow { window: 0 }),
    ];
    for (words, change) in cases {
        let mut c = config();
        change(&mut c);
        let e = SchedulerMachine::new(c).unwrap_err();
        assert!(e.message().contains(words), "{e}");
    }
}

/// Every key of `kv_transfer_params`.
const KEYS: [&str; 15] = [
    "do_remote_prefill",
    "do_remote_decode",
    "transfer_id",
    "remote_engine_id",
    "remote_incarnation",
    "remote_request_id",
    "remote_host",
    "remote_port",
    "remote_block_ids",
    "remote_num_tokens",
    "remote_lease_ms",
    "remote_lease_id",
    "tp_size",
    "pp_size",
    "dcp_size",
];

#[test]
fn a_key_that_is_null_is_a_key_that_is_missing() {
    let whole = TransferParams {
        transfer_id: Some("x-1".into()),
        tp_size: Some(1),
        pp_size: Some(1),
        dcp_size: Some(1),
        ..offered()
    };
    let serde_json::Value::Object(whole) = serde_json::to_value(&whole).unwrap() else { panic!("a map") };
    let keys: Vec<&str> = KEYS.into_iter().chain(["transfer_mode"]).collect();
    assert_eq!(whole.len(), keys.len(), "every key is tried");
    let parse = |map: &serde_json::Map<String, serde_json::Value>| {
        let packed = rmp_serde::to_vec_named(map).unwrap();
        let params: Result<TransferParams, _> = rmp_serde::from_slice(&packed);
        params.unwrap_or_else(|e| panic!("{map:?}: {e}"))
    };
    let mut all = whole.clone();
    for key in &keys {
        let (mut null, mut missing) = (whole.clone(), whole.clone());
        null.insert((*key).to_owned(), serde_json::Value::Null);
        missing.remove(*key);
        assert_eq!(parse(&null), parse(&missing), "{key}");
        all.insert((*key).to_owned(), serde_json::Value::Null);
    }
    assert_eq!(parse(&all), TransferParams::default());
    all.insert("do_remote_decode".into(), true.into());
    assert_eq!(parse(&all), asked());
}

#[test]
fn disallowed_hosts_hear_nothing() {
    let mut s = SchedulerMachine::new(SchedulerMachineConfig {
        allowed_hosts: Some(AllowedHosts::parse("10.1.0.0/16, prefill.example").unwrap()),
        ..config()
    })
    .unwrap();
    let request = id("d");
    for host in ["169.254.169.254", "other.example"] {
        let params = TransferParams { remote_host: Some(host.into()), ..offered() };
        let awaiting = TransferParams {
            transfer_id: Some("x".into()),
            remote_request_id: None,
            remote_block_ids: None,
            ..params.clone()
        };
        for params in [params, awaiting] {
            let refusals = [
                s.arrived(&request, &params).unwrap_err(),
                s.matched(&request, &params, 18, 0).unwrap_err(),
                s.allocated(&request, &params, lists(&[1, 2, 3, 4, 5], &[6, 7, 8]), 18, 18).unwrap_err(),
            ];
            for error in refusals {
                assert!(error.message().contains(host) && error.message().contains("allowed_hosts"), "{error}");
            }
            s.finished(&request, &params, FinishOutcome::Aborted, Vec::new(), 0).unwrap();
            // Neither a hold nor a load, and no release for the host.
            assert!(!s.has_pending());
        }
    }
    for host in ["10.1.2.3", "PREFILL.example"] {
        s.arrived(&id(host), &TransferParams { remote_host: Some(host.into()), ..offered() }).unwrap();
    }
    assert_eq!(take_step(&mut s).holds.len(), 2);
}
