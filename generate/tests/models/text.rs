//! Prompts to tokens and tokens to text.

use std::num::NonZero;
use std::ops::ControlFlow;

use crate::common::*;
use marlinspike_generate::run::{Ended, Options};
use marlinspike_generate::sample::Sampling;
use marlinspike_generate::text::{Message, Text, TextError};
use serde_json::{Value, json};

#[test]
fn prompts_have_the_tokens_of_the_tokenizers_package() {
    for name in NAMES {
        let text = Text::open(&golden(name)).unwrap();
        let prompt = "The lighthouse keeper counts the waves: one, two, three";
        assert_eq!(text.encode(prompt).unwrap(), Expected::read(name).input_ids);
        assert_eq!(text.stop(), [2, 0]);
    }
}

#[test]
fn a_conversation_follows_the_chat_template() {
    let text = Text::open(&golden("qwen3-moe-tiny")).unwrap();
    let messages = [Message { role: "user", content: "the waves" }];
    let found = text.encode_chat(&messages).unwrap();
    let plain =
        text.encode("<|im_start|>user\nthe waves<|im_end|>\n<|im_start|>assistant\n").unwrap();
    assert_eq!(found, plain);
    // The two special tokens are one token each.
    assert_eq!(found.iter().filter(|&&id| id == 1).count(), 2);
    assert_eq!(found.iter().filter(|&&id| id == 2).count(), 1);
}

#[test]
fn streamed_pieces_joined_are_the_text_and_no_character_is_cut() {
    let text = Text::open(&golden("qwen3-moe-tiny")).unwrap();
    let written = "the wäves: 波 and 🌊🌊, ￿ one\u{301} two";
    let tokens = text.encode(written).unwrap();
    let mut stream = text.stream();
    let pieces: Vec<String> = tokens.iter().map(|&t| stream.push(t).unwrap()).collect();
    assert!(pieces.iter().all(|p| !p.contains('\u{fffd}')), "{pieces:?}");
    assert!(pieces.iter().filter(|p| p.is_empty()).count() >= 6, "{pieces:?}");
    assert_eq!(pieces.concat() + &stream.finish().unwrap(), written);
    // A text that ends inside a character.
    let mut stream = text.stream();
    let cut: String = tokens[..tokens.len() - 5].iter().map(|&t| stream.push(t).unwrap()).collect();
    let cut = cut + &stream.finish().unwrap();
    assert!(written.starts_with(cut.trim_end_matches('\u{fffd}')), "{cut}");
}

#[test]
fn missing_and_damaged_files_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let error = Text::open(folder.path()).unwrap_err();
    assert!(matches!(error, TextError::NoTokenizer { .. }), "{error}");
    std::fs::write(folder.path().join("tokenizer.json"), "{\"version\": 3}").unwrap();
    let message = Text::open(folder.path()).unwrap_err().to_string();
    assert!(message.contains("tokenizer.json"), "{message}");
    let source = golden("mixtral-tiny").join("tokenizer.json");
    std::fs::copy(source, folder.path().join("tokenizer.json")).unwrap();
    let text = Text::open(folder.path()).unwrap();
    let messages = [Message { role: "user", content: "x" }];
    let message = text.encode_chat(&messages).unwrap_err().to_string();
    assert!(message.contains("found no chat template"), "{message}");
    std::fs::write(folder.path().join("generation_config.json"), "{\"eos_token_id\": \"2\"}")
        .unwrap();
    let message = Text::open(folder.path()).unwrap_err().to_string();
    assert!(message.contains("eos_token_id") && message.contains("generation_config"), "{message}");
}

/// A copy of a golden model's text files, one of which is changed.
fn changed(file: &str, change: impl FnOnce(&mut Value)) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for name in ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"]
    {
        std::fs::copy(golden("qwen3-moe-tiny").join(name), folder.path().join(name)).unwrap();
    }
    let path = folder.path().join(file);
    let mut value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    change(&mut value);
    std::fs::write(path, value.to_string()).unwrap();
    folder
}

#[test]
fn a_prompt_has_the_same_tokens_each_time_whatever_the_tokenizer_says() {
    let prompt = "counts the waves ".repeat(20);
    let plain = Text::open(&golden("qwen3-moe-tiny")).unwrap().encode(&prompt).unwrap();
    let cut =
        json!({"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0});
    for (key, value) in [("dropout", json!(0.5)), ("truncation", cut)] {
        let folder = changed("tokenizer.json", |t| match key {
            "dropout" => t["model"][key] = value,
            _ => t[key] = value,
        });
        let text = Text::open(folder.path()).unwrap();
        for _ in 0..3 {
            assert_eq!(text.encode(&prompt).unwrap(), plain, "{key}");
        }
    }
}

#[test]
fn a_tokenizer_that_lengthens_a_text_without_bound_is_refused() {
    let replace =
        |content: &str| json!({"type": "Replace", "pattern": {"String": "c"}, "content": content});
    let many = |list: &str, kind: Value, count: usize| json!({"type": "Sequence", list: vec![kind; count]});
    for (key, list) in [("normalizer", "normalizers"), ("decoder", "decoders")] {
        let folder = changed("tokenizer.json", |t| t[key] = many(list, replace("cc"), 40));
        let message = Text::open(folder.path()).unwrap_err().to_string();
        let expected = format!("tokenizer.json: {key}: found components");
        assert!(message.contains(&expected) && message.contains("at most 4096"), "{message}");
    }
    let folder =
        changed("tokenizer.json", |t| t["normalizer"] = many("normalizers", replace("cc"), 3));
    let text = Text::open(folder.path()).unwrap();
    let plain = Text::open(&golden("qwen3-moe-tiny")).unwrap();
    assert_eq!(text.encode("c").unwrap(), plain.encode("cccccccc").unwrap());
}

#[test]
fn text_files_of_another_form_are_named() {
    for (file, value, expected) in [
        ("generation_config.json", json!([]), "the file: found [], expected an object"),
        ("tokenizer_config.json", json!("x"), "the file: found \"x\", expected an object"),
        (
            "tokenizer_config.json",
            json!({"chat_template": 5}),
            "chat_template: found 5, expected a text",
        ),
    ] {
        let folder = changed(file, |config| *config = value);
        let message = Text::open(folder.path()).unwrap_err().to_string();
        assert!(message.contains(file) && message.contains(expected), "{message}");
    }
}

#[cfg(unix)]
#[test]
fn a_link_to_no_file_is_an_error_and_not_a_missing_file() {
    for target in ["nothing", "generation_config.json", "/etc/passwd"] {
        let folder = changed("tokenizer_config.json", |_| ());
        let path = folder.path().join("generation_config.json");
        std::fs::remove_file(&path).unwrap();
        Text::open(folder.path()).unwrap();
        std::os::unix::fs::symlink(target, &path).unwrap();
        let message = Text::open(folder.path()).unwrap_err().to_string();
        assert!(message.contains("generation_config.json"), "{message}");
    }
}

#[test]
fn a_template_that_asks_for_the_date_gets_the_stated_one() {
    let folder = changed("tokenizer_config.json", |config| {
        config["chat_template"] = json!("{{ strftime_now('%Y-%m-%d') }} {{ messages[0].content }}");
    });
    let text = Text::open(folder.path()).unwrap().with_date("2026-02-07".parse().unwrap());
    let messages = [Message { role: "user", content: "waves" }];
    assert_eq!(text.encode_chat(&messages).unwrap(), text.encode("2026-02-07 waves").unwrap());
    let folder = changed("tokenizer_config.json", |config| {
        config["chat_template"] =
            json!("{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}");
    });
    let text = Text::open(folder.path()).unwrap();
    let message = text.encode_chat(&messages).unwrap_err().to_string();
    assert!(
        message.contains("tokenizer_config.json: chat_template: ") && message.contains("steps"),
        "{message}"
    );
}

#[test]
fn generation_stops_at_its_length_at_a_stop_token_or_when_the_caller_wants() {
    let name = "qwen3-moe-tiny";
    let Expected { input_ids, new_tokens, .. } = Expected::read(name);
    with_decoder(&golden(name), |decoder| {
        let run = |options: &Options| {
            let mut seen = Vec::new();
            let done = decoder.generate(&input_ids, options, |token| {
                seen.push(token);
                ControlFlow::Continue(())
            });
            let done = done.unwrap();
            assert_eq!(done.tokens, seen);
            done
        };
        let greedy = Options::greedy(new_tokens.len());
        let done = run(&greedy);
        assert_eq!((&done.tokens, done.ended), (&new_tokens, Ended::Length));
        for chunk in 1..=input_ids.len() {
            let done = run(&Options { chunk: NonZero::new(chunk), ..greedy.clone() });
            assert_eq!(done.tokens, new_tokens, "{chunk}");
        }
        let stop = vec![9999, new_tokens[3]];
        let done = run(&Options { stop, ..greedy.clone() });
        assert_eq!((&done.tokens[..], done.ended), (&new_tokens[..3], Ended::Stop(new_tokens[3])));
        let done = decoder.generate(&input_ids, &greedy, |_| ControlFlow::Break(())).unwrap();
        assert_eq!((&done.tokens[..], done.ended), (&new_tokens[..1], Ended::Caller));
        assert!(run(&Options::greedy(0)).tokens.is_empty());
        // A draw from the best token alone is the greedy one.
        let sampling = Sampling::Random { temperature: 2.0, top_k: Some(1), top_p: None, seed: 4 };
        assert_eq!(run(&Options { sampling, ..greedy.clone() }).tokens, new_tokens);
        let sampling = Sampling::Random { temperature: 1.0, top_k: None, top_p: None, seed: 4 };
        let random = Options { sampling, ..greedy };
        assert_eq!(run(&random).tokens, run(&random).tokens);
        assert_ne!(run(&random).tokens, new_tokens);
    });
}

/// A folder with a golden tokenizer, changed.
fn tokenizer(change: impl FnOnce(&mut serde_json::Value)) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let bytes = std::fs::read(golden("qwen3-moe-tiny").join("tokenizer.json")).unwrap();
    let mut value = serde_json::from_slice(&bytes).unwrap();
    change(&mut value);
    std::fs::write(folder.path().join("tokenizer.json"), value.to_string()).unwrap();
    folder
}

#[test]
fn a_tokenizer_that_panics_is_an_error_that_names_the_file() {
    // Strips more characters than a token has.
    let folder = tokenizer(|t| {
        t["decoder"] = serde_json::json!({"type": "Strip", "content": "t", "start": 0, "stop": 9});
    });
    let text = Text::open(folder.path()).unwrap();
    let tokens = text.encode("t").unwrap();
    let message = text.stream().push(tokens[0]).unwrap_err().to_string();
    let expected = "tokenizer.json: decoder: found what the library tokenizers cannot process";
    assert!(message.contains(expected), "{message}");
}

#[test]
fn prompts_are_neither_cut_nor_filled_up_as_the_tokenizer_states() {
    let prompt = "the waves and the wind";
    let expected = Text::open(&golden("qwen3-moe-tiny")).unwrap().encode(prompt).unwrap();
    let folder = tokenizer(|t| {
        t["truncation"] = serde_json::json!({
            "max_length": 3, "stride": 5, "strategy": "LongestFirst", "direction": "Right",
        });
        t["padding"] = serde_json::json!({
            "strategy": {"Fixed": 40}, "direction": "Left", "pad_to_multiple_of": null,
            "pad_id": 0, "pad_type_id": 0, "pad_token": "x",
        });
    });
    assert_eq!(Text::open(folder.path()).unwrap().encode(prompt).unwrap(), expected);
}
