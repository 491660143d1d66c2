// Importing the extension registers the kernels of cpu/ and cuda/ with torch. It has no Python functions, only
// cpu_capability, the instruction set that the CPU kernels use, and cuda_obstacle: why those for CUDA were not
// registered, or nothing.
#include <Python.h>

#include "cpu_capability.h"
#include "cuda_obstacle.h"

PyMODINIT_FUNC PyInit__C(void) {
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr};
  PyObject* module = PyModule_Create(&definition);
  const char* capability = yoso::kCapabilityNames[static_cast<int>(yoso::cpu_capability())];
#ifdef YOSO_WITH_CUDA
  const char* obstacle = yoso::cuda_obstacle().c_str();
#else
  const char* obstacle = "";
#endif
  if (module == nullptr || PyModule_AddStringConstant(module, "cpu_capability", capability) != 0 ||
      PyModule_AddStringConstant(module, "cuda_obstacle", obstacle) != 0)
    return nullptr;
  return module;
}
