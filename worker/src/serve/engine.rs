//! From a configuration to a model, a pool and an engine.

use std::sync::Arc;

use baton_placement::calibration::{WorkerCoefficients, unknown_worker};
use baton_protocol::card::Card;
use baton_protocol::hash::HashKey;

use tokio::time::Instant;

use super::StartError;
use super::machine::{self, available_memory};
use crate::config::{EngineKind, EngineSettings, ModelSource, SimulatedTiming, WorkerConfig};
use crate::engine::measure::measure;
use crate::engine::scheduler::Limits;
use crate::engine::{Engine, EngineConfig};
use crate::kv::clock::Clock;
use crate::kv::{Geometry, KvPool, PoolConfig};
use crate::model::modelled::Modelled;
use crate::model::simulated::{Settings, Simulated, Text};
use crate::model::{Model, builtin, tiny};

/// Loads or makes the model. Takes as long as reading the file does. `modelled` is how long the steps of one whose work is real
/// take where the clock is not.
pub(crate) fn load_model(
    config: &WorkerConfig,
    modelled: Option<&SimulatedTiming>,
) -> Result<Box<dyn Model>, StartError> {
    if config.engine.kind == EngineKind::Simulated {
        let timing = config.engine.simulated.clone().unwrap_or_default();
        let seed = timing.seed.unwrap_or_else(|| seed_of(&config.name));
        let mut settings = Settings::new(simulated_coefficients(&timing), seed);
        if let Some(percent) = timing.jitter_percent {
            settings.noise = percent as f64 / 100.0;
        }
        // A simulated worker needs no model; where it is given one, it takes that one's tokenizer and template.
        if let Some(ModelSource::Path(path)) = &config.model.source {
            settings.text = Some(Text::of(builtin::load(path)?.facts()));
        }
        return Ok(Box::new(Simulated::new(settings)?));
    }
    let model: Box<dyn Model> = match &config.model.source {
        Some(ModelSource::Path(path)) => Box::new(builtin::load(path)?),
        Some(ModelSource::Builtin(model)) => Box::new(tiny::model(model.seed)),
        // The configuration was checked: only a simulated model has none.
        None => Box::new(tiny::model(0)),
    };
    Ok(match modelled {
        Some(timing) => Box::new(Modelled::new(model, simulated_coefficients(timing))),
        None => model,
    })
}

/// Workers of one pool have one configuration, but their steps should not vary in unison.
fn seed_of(name: &str) -> u64 {
    let digest = blake3::hash(name.as_bytes());
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&digest.as_bytes()[..8]);
    u64::from_le_bytes(bytes)
}

fn simulated_coefficients(timing: &SimulatedTiming) -> WorkerCoefficients {
    let or = |value: Option<u64>, per_millisecond: f64, default: f64| {
        value.map_or(default, |value| value as f64 / per_millisecond)
    };
    let default = unknown_worker();
    WorkerCoefficients {
        floor: or(timing.prefill_floor_microseconds, 1e3, default.floor),
        a: or(timing.prefill_base_microseconds, 1e3, default.a),
        b: or(timing.prefill_per_token_nanoseconds, 1e6, default.b),
        k: or(timing.prefill_per_token_pair_picoseconds, 1e9, default.k),
        d0: or(timing.decode_base_microseconds, 1e3, default.d0),
        d1: or(timing.decode_per_sequence_nanoseconds, 1e6, default.d1),
        d2: or(timing.decode_per_context_token_picoseconds, 1e9, default.d2),
        ..default
    }
}

/// Blocks of the pool: as asked for, or as fit.
pub(crate) fn pool_blocks(
    config: &WorkerConfig,
    geometry: Geometry,
    max_context: usize,
) -> Result<usize, StartError> {
    let block_bytes = geometry.block_bytes().max(1) as u64;
    let sequences = u64::from(config.engine.max_sequences);
    let (field, blocks) = match (config.kv_pool.blocks, config.kv_pool.bytes) {
        (Some(blocks), _) => ("kvPool.blocks", blocks),
        (None, Some(bytes)) => ("kvPool.bytes", bytes / block_bytes),
        (None, None) => {
            let longest = geometry.blocks_for(max_context) as u64 * sequences;
            (
                "kvPool",
                (available_memory() / 4 / block_bytes).min(longest).max(1),
            )
        }
    };
    if blocks < sequences {
        return Err(StartError::PoolTooSmall {
            worker: config.name.clone(),
            field,
            blocks,
            sequences,
            block_bytes,
        });
    }
    usize::try_from(blocks).map_err(|_| StartError::PoolTooLarge {
        worker: config.name.clone(),
        field,
        blocks,
    })
}

pub(crate) fn make_pool(
    card: &Card,
    geometry: Geometry,
    blocks: usize,
    hash_key: HashKey,
    clock: Arc<dyn Clock>,
) -> Result<KvPool, StartError> {
    let config = PoolConfig {
        geometry,
        blocks,
        kv_identity: card.kv_identity.clone(),
        layout: card.layout.tag(),
        hash_key,
        event_capacity: PoolConfig::EVENT_CAPACITY,
    };
    Ok(KvPool::new(config, available_memory(), clock)?)
}

/// What computes, as the card says it: simulated workers are alike when they are told the same times.
pub(crate) fn accelerator(engine: &EngineSettings) -> String {
    match engine.kind {
        EngineKind::Builtin | EngineKind::Vllm | EngineKind::Sglang => {
            format!("{}, 1 thread", machine::processor())
        }
        EngineKind::Simulated => {
            // The seed gives each its own noise, not its own speed.
            let told = SimulatedTiming {
                seed: None,
                ..engine.simulated.clone().unwrap_or_default()
            };
            let told = format!("{told:?}");
            let digest = blake3::hash(told.as_bytes()).to_hex();
            format!("simulated {}", &digest[..8])
        }
    }
}

/// Milliseconds that this process has computed: at start its other threads wait, and what else runs on the machine does not count.
fn processor_time() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 * 1e3 + time.tv_nsec as f64 / 1e6
}

/// The engine, with its first guess of its own costs: measured where work is real, a class's constants where it is simulated (a
/// simulated worker's own are what routers are to learn).
pub(crate) fn make_engine(
    config: &WorkerConfig,
    mut model: Box<dyn Model>,
    pool: KvPool,
) -> Result<Engine, StartError> {
    let started = Instant::now();
    let stopwatch = move || started.elapsed().as_secs_f64() * 1e3;
    let prior = match config.engine.kind {
        EngineKind::Simulated => None,
        // Servers of their own are not made here.
        EngineKind::Builtin | EngineKind::Vllm | EngineKind::Sglang => {
            measure(model.as_mut(), &pool, &processor_time)?
        }
    };
    let settings = &config.engine;
    let max_context = settings
        .max_model_length
        .map_or(usize::MAX, |length| length as usize);
    Ok(Engine::new(
        model,
        pool,
        EngineConfig {
            limits: Limits {
                max_sequences: settings.max_sequences as usize,
                max_batched_tokens: settings.batched_tokens() as usize,
                max_waiting: settings.max_waiting as usize,
            },
            max_context,
            tpot_objective: config.tpot_objective_milliseconds,
            prior: prior.unwrap_or_else(unknown_worker),
        },
        Box::new(stopwatch),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn simulated_constants_are_converted_to_milliseconds() {
        let timing = SimulatedTiming {
            prefill_base_microseconds: Some(1500),
            prefill_per_token_nanoseconds: Some(1_500_000),
            prefill_per_token_pair_picoseconds: Some(2_000),
            decode_base_microseconds: Some(20_000),
            ..SimulatedTiming::default()
        };
        let made = simulated_coefficients(&timing);
        assert_eq!((made.a, made.b, made.k, made.d0), (1.5, 1.5, 2e-6, 20.0));
        assert_eq!(made.floor, unknown_worker().floor);
    }
}
