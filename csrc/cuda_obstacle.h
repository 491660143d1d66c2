// What keeps the CUDA kernels from running here. Beside common.h, since module.cpp tells Python.
#pragma once

#include <string>

namespace yoso {

// Why no GPU of this machine can run them, as far as that is known; empty: one may, or there is none.
const std::string& cuda_obstacle();

}  // namespace yoso
