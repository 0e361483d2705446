//! The server's own metrics, from Prometheus' text form. Pure, and total over any text.

use std::collections::HashMap;

/// One line of a scrape.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample<'a> {
    pub name: &'a str,
    /// As written, escapes resolved.
    pub labels: HashMap<&'a str, String>,
    pub value: f64,
}

/// Every line that is a sample; others are passed over.
pub fn samples(text: &str) -> impl Iterator<Item = Sample<'_>> {
    text.lines().filter_map(sample)
}

fn sample(line: &str) -> Option<Sample<'_>> {
    let line = line.trim();
    if line.is_empty() || line.starts_with('#') {
        return None;
    }
    let end = line.find(['{', ' ', '\t'])?;
    let (name, mut rest) = line.split_at(end);
    let mut labels = HashMap::new();
    if let Some(inner) = rest.strip_prefix('{') {
        rest = inner;
        loop {
            rest = rest.trim_start_matches([',', ' ']);
            if let Some(after) = rest.strip_prefix('}') {
                rest = after;
                break;
            }
            let (label, after) = rest.split_once("=\"")?;
            let (value, after) = quoted(after)?;
            labels.insert(label.trim(), value);
            rest = after;
        }
    }
    let value = rest.split_whitespace().next()?.parse().ok()?;
    Some(Sample {
        name,
        labels,
        value,
    })
}

/// Up to the closing quote, and what follows it.
fn quoted(text: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut characters = text.char_indices();
    while let Some((at, character)) = characters.next() {
        match character {
            '"' => return Some((value, &text[at + 1..])),
            '\\' => match characters.next()?.1 {
                'n' => value.push('\n'),
                other => value.push(other),
            },
            other => value.push(other),
        }
    }
    None
}

/// What the daemon reads of vLLM's metrics. Counters are totals since the process began; ranks of one server are added up.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Reading {
    /// Of the process, seconds since the epoch.
    pub process_start: Option<f64>,
    pub running: f64,
    pub waiting: f64,
    /// Requests whose KV another engine is to send: they are computed there, and wait here for room and for it.
    pub fetching: f64,
    /// Requests that are computed and whose KV another engine has not fetched yet, as far as the server counts them.
    pub unsent: f64,
    /// Share of the blocks that requests and leases hold, 0 to 1.
    pub kv_usage: f64,
    pub preemptions: f64,
    /// Tokens of a block.
    pub block_size: Option<u32>,
    /// Blocks of the device, of all ranks.
    pub blocks: Option<u32>,
    /// `auto` or a format.
    pub cache_dtype: Option<String>,
    pub prefix_caching: Option<bool>,
    /// Prompt tokens computed here, found in the cache, and taken over from another engine.
    pub computed: f64,
    pub found: f64,
    pub taken_over: f64,
    pub generated: f64,
    pub first_tokens: Sum,
    pub between_tokens: Sum,
    pub prompts: Sum,
    pub late_reads: f64,
    pub expired: f64,
    pub failed_transfers: f64,
}

/// A histogram's sum and count.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sum {
    pub sum: f64,
    pub count: f64,
}

impl Sum {
    /// What came since `before`; nothing where the process began anew.
    pub fn since(self, before: Self) -> Self {
        Self {
            sum: (self.sum - before.sum).max(0.0),
            count: (self.count - before.count).max(0.0),
        }
    }

    pub fn mean(self) -> Option<f64> {
        (self.count > 0.0).then(|| self.sum / self.count)
    }
}

impl Reading {
    /// Reads a scrape of vLLM.
    pub fn vllm(text: &str) -> Self {
        let mut reading = Self::default();
        for sample in samples(text) {
            reading.take(&sample);
        }
        reading
    }

    /// Reads a scrape of SGLang. What does not change it says elsewhere.
    pub fn sglang(text: &str) -> Self {
        let mut reading = Self::default();
        let mut prompts = 0.0;
        for sample in samples(text).filter(|sample| sample.value.is_finite()) {
            let value = sample.value;
            let Some(name) = sample.name.strip_prefix("sglang:") else {
                continue;
            };
            match name {
                "num_running_reqs" => reading.running += value,
                // A prompt is computed once its reader is there.
                "num_queue_reqs" | "num_prefill_bootstrap_queue_reqs" => reading.waiting += value,
                "num_decode_prealloc_queue_reqs" | "num_decode_transfer_queue_reqs" => {
                    reading.fetching += value;
                }
                "num_prefill_inflight_queue_reqs" => reading.unsent += value,
                "token_usage" => reading.kv_usage = reading.kv_usage.max(value.clamp(0.0, 1.0)),
                "prompt_tokens_total" => prompts += value,
                "cached_tokens_total" => reading.found += value,
                "generation_tokens_total" => reading.generated += value,
                "time_to_first_token_seconds_sum" => reading.first_tokens.sum += value,
                "time_to_first_token_seconds_count" => reading.first_tokens.count += value,
                "inter_token_latency_seconds_sum" => reading.between_tokens.sum += value,
                "inter_token_latency_seconds_count" => reading.between_tokens.count += value,
                "num_transfer_failed_reqs_total" | "num_bootstrap_failed_reqs_total" => {
                    reading.failed_transfers += value;
                }
                _ => {}
            }
        }
        reading.computed = (prompts - reading.found).max(0.0);
        reading.prompts = Sum {
            sum: prompts,
            count: reading.first_tokens.count,
        };
        reading
    }

    fn take(&mut self, sample: &Sample<'_>) {
        let value = sample.value;
        if !value.is_finite() {
            return;
        }
        let label = |name: &str| sample.labels.get(name).map(String::as_str);
        let number = |name: &str| label(name).and_then(|text| text.parse::<u32>().ok());
        if sample.name == "process_start_time_seconds" {
            self.process_start = Some(value);
            return;
        }
        let Some(name) = sample.name.strip_prefix("vllm:") else {
            return;
        };
        match name {
            "num_requests_running" => self.running += value,
            "num_requests_waiting" => self.waiting += value,
            // Of several ranks the fullest.
            "kv_cache_usage_perc" => self.kv_usage = self.kv_usage.max(value.clamp(0.0, 1.0)),
            "num_preemptions_total" => self.preemptions += value,
            "cache_config_info" => {
                self.block_size = number("block_size").or(self.block_size);
                if let Some(blocks) = number("num_gpu_blocks") {
                    self.blocks = Some(self.blocks.unwrap_or(0).saturating_add(blocks));
                }
                self.cache_dtype = label("cache_dtype").map(str::to_owned);
                self.prefix_caching =
                    label("enable_prefix_caching").map(|text| text.eq_ignore_ascii_case("true"));
            }
            "prompt_tokens_by_source_total" => match label("source") {
                Some("local_compute") => self.computed += value,
                Some("local_cache_hit") => self.found += value,
                Some("external_kv_transfer") => self.taken_over += value,
                _ => {}
            },
            "generation_tokens_total" => self.generated += value,
            "time_to_first_token_seconds_sum" => self.first_tokens.sum += value,
            "time_to_first_token_seconds_count" => self.first_tokens.count += value,
            "inter_token_latency_seconds_sum" => self.between_tokens.sum += value,
            "inter_token_latency_seconds_count" => self.between_tokens.count += value,
            "request_prompt_tokens_sum" => self.prompts.sum += value,
            "request_prompt_tokens_count" => self.prompts.count += value,
            "nixl_num_notifications_after_expiry_total" => self.late_reads += value,
            "nixl_num_kv_expired_reqs_total" => self.expired += value,
            "nixl_num_failed_transfers_total" => self.failed_transfers += value,
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const METRICS: &str = include_str!("../../tests/frames/metrics.txt");
    const METRICS_NIXL: &str = include_str!("../../tests/frames/metrics-nixl.txt");

    #[test]
    fn a_real_servers_metrics_are_read() {
        let reading = Reading::vllm(METRICS);
        assert_eq!(reading.block_size, Some(32));
        assert!(reading.blocks.is_some_and(|blocks| blocks > 0));
        assert_eq!(reading.cache_dtype.as_deref(), Some("auto"));
        assert_eq!(reading.prefix_caching, Some(true));
        assert_eq!(reading.process_start, Some(1_795_958_918.99));
        let found = (reading.computed, reading.found, reading.generated);
        assert_eq!(found, (23_346.0, 1152.0, 528.0));
        assert_eq!(
            (reading.prompts.sum, reading.prompts.count),
            (24_498.0, 50.0)
        );
        assert!(reading.first_tokens.count > 0.0 && reading.between_tokens.count > 0.0);
        assert_eq!(reading.late_reads, 0.0);
    }

    #[test]
    fn the_connectors_counters_are_read() {
        let late = METRICS_NIXL.replace(
            "nixl_num_notifications_after_expiry_total{engine=\"0\",model_name=\"tiny\"} 0.0",
            "nixl_num_notifications_after_expiry_total{engine=\"0\",model_name=\"tiny\"} 3.0",
        );
        assert_eq!(Reading::vllm(METRICS_NIXL).late_reads, 0.0);
        assert_eq!(Reading::vllm(&late).late_reads, 3.0);
    }

    #[test]
    fn labels_are_read_with_their_escapes_and_odd_lines_are_passed_over() {
        let text = "# HELP a b\na{x=\"1\\\"2\\\\\\n\", y=\"z\",} 1e3 17\nb 2\nc{x=\"open\nd{} NaN\n e\nf{x} 1\n";
        let found: Vec<_> = samples(text).collect();
        let names: Vec<_> = found.iter().map(|sample| sample.name).collect();
        assert_eq!(names, ["a", "b", "d"]);
        assert_eq!(found[0].labels["x"], "1\"2\\\n");
        assert_eq!(found[0].labels["y"], "z");
        assert_eq!((found[0].value, found[1].value), (1000.0, 2.0));
    }

    #[test]
    fn ranks_of_one_server_are_added_up() {
        let text = "vllm:num_requests_running{engine=\"0\"} 2\nvllm:num_requests_running{engine=\"1\"} 3\n\
            vllm:kv_cache_usage_perc{engine=\"0\"} 0.25\nvllm:kv_cache_usage_perc{engine=\"1\"} 0.5\n";
        let reading = Reading::vllm(text);
        assert_eq!((reading.running, reading.kv_usage), (5.0, 0.5));
    }

    /// Names of SGLang 0.5.23.
    #[test]
    fn requests_on_their_way_from_one_sglang_server_to_another_are_counted() {
        let prefill = Reading::sglang(
            "sglang:num_queue_reqs{tp_rank=\"0\"} 1\nsglang:num_prefill_bootstrap_queue_reqs{tp_rank=\"0\"} 2\n\
             sglang:num_prefill_inflight_queue_reqs{tp_rank=\"0\"} 3\nsglang:num_bootstrap_failed_reqs_total 4\n",
        );
        let counts = (prefill.waiting, prefill.unsent, prefill.failed_transfers);
        assert_eq!(counts, (3.0, 3.0, 4.0));
        let decode = Reading::sglang(
            "sglang:num_decode_prealloc_queue_reqs 1\nsglang:num_decode_transfer_queue_reqs 2\n\
             sglang:num_transfer_failed_reqs_total 5\n",
        );
        let counts = (decode.waiting, decode.fetching, decode.failed_transfers);
        assert_eq!(counts, (0.0, 3.0, 5.0));
    }

    proptest! {
        #[test]
        fn any_text_is_read(text in ".{0,200}") {
            let _ = Reading::vllm(&text);
        }

        #[test]
        fn any_line_of_labels_is_read(text in "a\\{[a-z=\",\\\\ }]{0,40}") {
            let _ = Reading::vllm(&text);
        }
    }
}
