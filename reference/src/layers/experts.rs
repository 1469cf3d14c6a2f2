//! Placement of experts on ranks (upstream `determine_expert_map`).

use super::LayerError;

/// How experts are distributed over ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ExpertPlacement {
    /// Consecutive experts share a rank.
    Linear,
    /// Expert e goes to rank e mod size.
    RoundRobin,
}

/// The experts of one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpertMap {
    /// Number of experts on this rank.
    pub local_num_experts: usize,
    /// `[global_num_experts]` local index of each expert, −1 for experts of other ranks; `None` if
    /// one rank has all.
    pub map: Option<Vec<i32>>,
    /// Global ids of the local experts, in local order.
    pub global_ids: Vec<usize>,
}

/// Distributes `global_num_experts` experts over `ep_size` ranks as evenly as possible; with a
/// remainder, the first ranks get one more.
///
/// # Errors
/// [`LayerError::Zero`], [`LayerError::Rank`]; [`LayerError::Overflow`] above 2^20 experts.
pub fn determine_expert_map(
    ep_size: usize,
    ep_rank: usize,
    global_num_experts: usize,
    placement: ExpertPlacement,
) -> Result<ExpertMap, LayerError> {
    const MAX_EXPERTS: usize = 1 << 20;
    if ep_size == 0 {
        return Err(LayerError::Zero { what: "ep_size" });
    }
    if ep_rank >= ep_size {
        return Err(LayerError::Rank { what: "ep_rank", rank: ep_rank, size: ep_size });
    }
    if global_num_experts > MAX_EXPERTS {
        return Err(LayerError::Overflow { what: "global_num_experts" });
    }
    let (base, remainder) = (global_num_experts / ep_size, global_num_experts % ep_size);
    let local = base + usize::from(ep_rank < remainder);
    let global_ids: Vec<usize> = match placement {
        ExpertPlacement::Linear => {
            let start = ep_rank * base + ep_rank.min(remainder);
            (start..start + local).collect()
        }
        ExpertPlacement::RoundRobin => (ep_rank..global_num_experts).step_by(ep_size).collect(),
    };
    let map = (ep_size > 1).then(|| {
        let mut map = vec![-1; global_num_experts];
        for (local, &global) in global_ids.iter().enumerate() {
            map[global] = local as i32;
        }
        map
    });
    Ok(ExpertMap { local_num_experts: local, map, global_ids })
}
