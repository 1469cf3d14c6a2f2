//! Campaigns that are spread over machines: shards, summary files, merging.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use marlinspike::case::Op;
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike_proptests::campaign::{
    Campaign, CampaignError, Event, Fault, Filter, KeptResult, Limit, Outputs, Run, Shard, Trial,
    merge,
};

/// The int4 codes of `int4_fp8_preprocess` without zero points; `wrong` makes every code wrong.
fn codes(trial: &Trial, wrong: u32) -> Result<Outputs, Fault> {
    if trial.case.inputs.contains_key("qzeros") {
        return Err(Fault::Unsupported { reason: "GPTQ only".to_owned() });
    }
    let (shape, words) = {
        let qweight = &trial.case.inputs["qweight"];
        (qweight.shape().to_vec(), qweight.elements::<u32>().into_owned())
    };
    let code = |v: u32| if v < 8 { 15 - v } else { v - 8 };
    let word = |w: &u32| (0..8).map(|j| (code(w >> (4 * j) & 15) ^ wrong) << (4 * j)).sum();
    let made: Vec<u32> = words.iter().map(word).collect();
    let made = Tensor::from_vec("qweight", DType::I32, shape, made).unwrap();
    Ok(Outputs::from([("qweight".to_owned(), made)]))
}

fn campaign(shard: Shard) -> Campaign {
    let mut campaign = Campaign::new(Op::Preprocess, 5, Filter::default()).unwrap();
    campaign.shard = shard;
    campaign
}

/// Runs a shard in `folder`, with its summary and its failing cases.
fn run(folder: &Path, shard: Shard, wrong: u32) -> PathBuf {
    std::fs::create_dir_all(folder).unwrap();
    let mut kernel = |trial: &Trial| codes(trial, wrong);
    let kept = folder.join("kept");
    let done = campaign(shard);
    let done = done.run_with_kept(Some(&kept), &mut kernel, &Limit::cases(24), &mut |_| ());
    let summary = folder.join("summary.json");
    std::fs::write(&summary, done.unwrap().to_json().unwrap().to_string()).unwrap();
    summary
}

fn part(number: u64, of: u64) -> Shard {
    Shard::new(number, of).unwrap()
}

#[test]
fn each_case_belongs_to_one_shard() {
    let bytes = |campaign: &Campaign, cases: u64| {
        let mut seen = BTreeMap::new();
        let mut indices = Vec::new();
        let mut kernel = |trial: &Trial| {
            seen.insert(trial.case.name.clone(), trial.to_bytes().unwrap());
            codes(trial, 0)
        };
        campaign
            .run(&mut kernel, &Limit::cases(cases), &mut |event| {
                if let Event::Judged(index, _) = event {
                    indices.push(index);
                }
            })
            .unwrap();
        (seen, indices)
    };
    for (of, cases) in [(1, 5), (2, 24), (5, 24), (7, 4)] {
        let (whole, all) = bytes(&campaign(Shard::WHOLE), cases);
        assert_eq!(all, (0..cases).collect::<Vec<_>>());
        let (mut union, mut indices) = (BTreeMap::new(), BTreeSet::new());
        for shard in part(1, of).all() {
            let (seen, own) = bytes(&campaign(shard), cases);
            // Shares differ by at most one case.
            let share = own.len() as u64;
            assert!(share == cases / of || share == cases / of + 1, "{shard} of {cases}: {share}");
            for index in own {
                assert!(indices.insert(index), "case {index} is in two shards of {of}");
            }
            union.extend(seen);
        }
        assert_eq!(indices.into_iter().collect::<Vec<_>>(), all);
        assert!(union == whole, "{of} shards");
    }
}

#[test]
fn shards_are_written_from_one() {
    for right in ["1/1", "1/4", "4/4"] {
        assert_eq!(right.parse::<Shard>().unwrap().to_string(), right);
    }
    for wrong in ["0/4", "5/4", "1", "1/0", "a/b", "1/4/4", "-1/4", ""] {
        assert!(wrong.parse::<Shard>().is_err(), "{wrong}");
    }
}

/// Counts and coverage of merged shards are those of the whole campaign.
#[test]
fn merged_shards_are_the_campaign() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let whole = merge(&[run(&at("whole"), Shard::WHOLE, 0)], None).unwrap();
    let shards: Vec<_> =
        part(1, 3).all().enumerate().map(|(i, shard)| run(&at(&i.to_string()), shard, 0)).collect();
    let merged = merge(&shards, None).unwrap();
    assert!(whole.success && merged.success);
    let (whole, all) = (&whole.campaigns[0], &merged.campaigns[0]);
    assert_eq!(all.op, "int4_fp8_preprocess");
    assert_eq!((all.passed, all.skipped, all.failed), (whole.passed, whole.skipped, whole.failed));
    assert!(all.passed > 0 && all.skipped > 0 && all.passed + all.skipped == 24);
    assert_eq!(all.coverage, whole.coverage);
    // Skipped configurations are not covered.
    assert_eq!(all.coverage.axes["checkpoint_format"]["awq"], 0);
    assert_eq!(all.runs.len(), 3);

    let two = merge(&shards[..2], None).unwrap();
    assert!(!two.success);
    let missing: Vec<_> = two.campaigns[0].missing.iter().map(|m| m.shard).collect();
    assert_eq!(missing, [part(3, 3)]);
}

#[test]
fn regressions_are_copied_once() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let summaries = [run(&at("a"), part(1, 2), 8), run(&at("b"), part(2, 2), 8)];
    // A second run of the first machine reports its kept case again.
    run(&at("a"), part(1, 2), 8);
    let regressions = at("regressions");
    let merged = merge(&summaries, Some(&regressions)).unwrap();
    assert!(!merged.success);
    let campaign = &merged.campaigns[0];
    assert_eq!(campaign.findings.len(), 1, "{:?}", campaign.findings);
    assert_eq!((campaign.findings[0].runs, campaign.kept_that_fail.len()), (2, 1));
    let files = std::fs::read_dir(&regressions).unwrap().count();
    assert_eq!((merged.copied.len(), merged.duplicates, files), (1, 1, 1));
    // The merged folder is a folder of kept cases.
    let mut wrong = |trial: &Trial| codes(trial, 8);
    let whole = self::campaign(Shard::WHOLE);
    let again = whole.run_with_kept(Some(&regressions), &mut wrong, &Limit::cases(0), &mut |_| ());
    let again = again.unwrap();
    assert_eq!(again.kept.len(), 1);
    assert_eq!(again.kept[0].result, KeptResult::Fail);
    // Merging again copies nothing.
    let again = merge(&summaries, Some(&regressions)).unwrap();
    assert_eq!((again.copied.len(), again.duplicates), (0, 2));

    // Another content of the same name is another regression.
    let name = Path::new(&merged.copied[0]).file_name().unwrap().to_owned();
    let mut case = marlinspike::case::Case::parse(&std::fs::read(&merged.copied[0]).unwrap())
        .map(|case| (case.to_bytes().unwrap(), case.inputs["qweight"].shape().to_vec()))
        .unwrap();
    let mut other = marlinspike::case::Case::parse(&case.0).unwrap();
    let words = vec![0x1234_5678u32; case.1.iter().product()];
    other.add_input("qweight", Tensor::from_vec("", DType::I32, case.1.clone(), words).unwrap());
    case.0 = other.to_bytes().unwrap();
    std::fs::write(at("b").join("kept").join(&name), &case.0).unwrap();
    let merged = merge(&summaries, Some(&regressions)).unwrap();
    assert_eq!((merged.copied.len(), merged.duplicates), (1, 1));
    assert_eq!(std::fs::read(&merged.copied[0]).unwrap(), case.0);
}

#[test]
fn what_cannot_be_merged_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let problem = |summaries: &[PathBuf]| {
        let regressions = at("regressions");
        let error = merge(summaries, Some(&regressions)).unwrap_err();
        assert!(!regressions.exists(), "a partial merge");
        error.to_string()
    };
    let first = run(&at("a"), part(1, 2), 8);
    assert!(problem(&[first.clone(), first.clone()]).contains("shard 1/2 of seed 0x5"));
    let third = run(&at("c"), part(1, 3), 8);
    assert!(problem(&[first.clone(), third]).contains("one division"));
    assert!(problem(&[at("absent.json")]).contains("absent.json"));
    std::fs::write(at("other.json"), "{\"cases\": 3}").unwrap();
    assert!(problem(&[at("other.json")]).contains("other.json: missing field"));
    for file in std::fs::read_dir(at("a").join("kept")).unwrap() {
        std::fs::write(file.unwrap().path(), b"torn").unwrap();
    }
    assert!(problem(std::slice::from_ref(&first)).contains("safetensors: "));
    std::fs::remove_dir_all(at("a").join("kept")).unwrap();
    assert!(problem(&[first]).contains("a kept case is absent"));
}

/// An unchecked case keeps a run from succeeding; a JSON failure has named parts.
#[test]
fn a_run_states_what_it_did() {
    let run = |kernel: &mut dyn FnMut(&Trial) -> Result<Outputs, Fault>| -> Run {
        let mut kernel = kernel;
        let whole = campaign(Shard::WHOLE);
        whole.run_with_kept(None, &mut kernel, &Limit::cases(6), &mut |_| ()).unwrap()
    };
    assert!(run(&mut |trial| codes(trial, 0)).success);
    let nothing = run(&mut |_| Err(Fault::Unsupported { reason: "none".to_owned() }));
    assert!(!nothing.success && nothing.summary.failed == 0);
    let json = run(&mut |trial| codes(trial, 8)).to_json().unwrap();
    assert_eq!((&json["success"], &json["summary"]["shard"]), (&false.into(), &"1/1".into()));
    let failure = &json["summary"]["findings"][0]["failure"];
    assert_eq!(failure["report"]["outputs"][0]["name"], "qweight");
    assert!(failure["fault"].is_null());
    let crash = run(&mut |_| Err(Fault::Crashed { detail: "signal 9".to_owned() }));
    let failure = crash.to_json().unwrap()["summary"]["findings"][0]["failure"].clone();
    assert_eq!(failure["fault"]["fault"], "crashed");
    assert!(failure["report"].is_null());
}

/// The same campaign where some outputs cannot be judged.
#[test]
fn unchecked_cases_are_no_success() {
    let mut campaign = Campaign::new(Op::Router, 7, Filter::default()).unwrap();
    campaign.outputs = vec!["topk_ids".to_owned(), "topk_weights".to_owned()];
    let mut kernel = |trial: &Trial| {
        let mut case = trial.case.clone();
        marlinspike::check::add_outputs(&mut case)
            .map_err(|e| Fault::Unsupported { reason: e.to_string() })?;
        let wanted = |name: &String| trial.wanted.iter().any(|w| w.name == *name);
        Ok(case.outputs.into_iter().filter(|(name, _)| wanted(name)).collect())
    };
    let run = campaign.run_with_kept(None, &mut kernel, &Limit::cases(40), &mut |_| ());
    let run = run.unwrap();
    assert!(run.summary.passed > 0 && run.summary.unchecked > 0, "{:?}", run.summary);
    assert!(run.summary.failed == 0 && !run.success);
}

/// Kept files that are not cases are named.
#[test]
fn a_torn_kept_case_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("torn.safetensors"), b"torn").unwrap();
    let mut kernel = |trial: &Trial| codes(trial, 0);
    let run = campaign(Shard::WHOLE).run_with_kept(
        Some(folder.path()),
        &mut kernel,
        &Limit::cases(1),
        &mut |_| (),
    );
    let error = run.unwrap_err();
    assert!(matches!(error, CampaignError::Case { .. }));
    assert!(error.to_string().contains("torn.safetensors"), "{error}");
}
