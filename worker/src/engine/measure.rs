//! A first guess of an engine's cost coefficients: a few steps on an empty pool before it serves.
//!
//! Without it a router would place by a stranger's constants until the worker has computed its first prompts, and a CPU is a
//! thousand times slower than the accelerators whose constants are published.

use baton_placement::calibration::{
    DecodeMeasurement, PrefillMeasurement, WorkerCoefficients, measured,
};

use crate::kv::{BlockId, CacheScope, KvPool, Reservation, Reserve};
use crate::model::{Batch, Model, ModelError, SequenceKey, SequenceSlice};

/// (tokens, cached) of the prompts measured: three lengths, and one after others for the price of attention. The first one warms up.
const PROMPTS: [(usize, usize); 5] = [(8, 0), (8, 0), (32, 0), (96, 0), (32, 96)];
/// Sequences that decode at once, each after as many tokens as were computed last.
const DECODES: [usize; 4] = [1, 1, 2, 4];
const CONTEXT: usize = 128;

/// Measures. `None` when the pool is too small for it or a step took no time at all: then there is no guess.
///
/// # Errors
/// [`ModelError`] when the model refuses its own pool: it would refuse every request too.
pub fn measure(
    model: &mut dyn Model,
    pool: &KvPool,
    stopwatch: &dyn Fn() -> f64,
) -> Result<Option<WorkerCoefficients>, ModelError> {
    let vocabulary = model.facts().shape.vocabulary.max(1);
    let fits = model.facts().shape.max_context > CONTEXT;
    let tokens: Vec<u32> = (0..=CONTEXT)
        .map(|token| (token % vocabulary) as u32)
        .collect();
    let scope = CacheScope::salted("self-measurement");
    let reserve = |tokens: &[u32]| {
        pool.reserve(&Reserve {
            tokens,
            scope: &scope,
            room: 0,
            leave_last: true,
        })
        .ok()
    };
    let widest = DECODES.into_iter().max().unwrap_or(1);
    let Some(prompt) = reserve(&tokens[..CONTEXT]).filter(|_| fits) else {
        return Ok(None);
    };
    // One block for the token that each sequence adds; what was never completed never enters the cache.
    let ends: Option<Vec<Reservation>> = (0..widest).map(|_| reserve(&tokens[..1])).collect();
    let Some(ends) = ends else {
        return Ok(None);
    };
    let mut run = |slices: Vec<SequenceSlice<'_>>| -> Result<f64, ModelError> {
        let begun = stopwatch();
        let report = model.forward(&Batch { slices }, pool.store())?;
        Ok(report
            .duration_milliseconds
            .unwrap_or_else(|| stopwatch() - begun))
    };

    let mut prefill = Vec::new();
    for (tokens_now, cached) in PROMPTS {
        let milliseconds = run(vec![SequenceSlice {
            sequence: SequenceKey(0),
            history: &tokens[..cached + tokens_now],
            start: cached,
            blocks: prompt.blocks(),
            wants_output: true,
        }])?;
        prefill.push(PrefillMeasurement {
            tokens: tokens_now as u32,
            cached: cached as u32,
            milliseconds,
        });
    }
    prefill.remove(0);

    let tables: Vec<Vec<BlockId>> = ends
        .iter()
        .map(|end| [prompt.blocks(), end.blocks()].concat())
        .collect();
    let mut decode = Vec::new();
    for sequences in DECODES {
        let slices = tables
            .iter()
            .zip(0..)
            .take(sequences)
            .map(|(blocks, key)| SequenceSlice {
                sequence: SequenceKey(key),
                history: &tokens,
                start: CONTEXT,
                blocks,
                wants_output: true,
            });
        let milliseconds = run(slices.collect())?;
        decode.push(DecodeMeasurement {
            sequences: sequences as u32,
            context: (sequences * tokens.len()) as u64,
            milliseconds,
        });
    }
    Ok(measured(&prefill, &decode))
}
