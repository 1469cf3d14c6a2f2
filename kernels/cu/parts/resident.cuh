#pragma once
// Thread blocks on a multiprocessor of products of e4m3fn rows on Hopper: with experts and few rows, one multiplies while the
// other one writes its tile.

constexpr unsigned RESIDENT = IS_MOE && WARPS == 8 && ROWS <= 32 ? 2 : 1;
