// Importing the extension registers the kernels of cpu/ and cuda/ with torch. It has no Python functions, only
// cpu_capability, the instruction set that the CPU kernels use.
#include <Python.h>

#include "cpu_capability.h"

PyMODINIT_FUNC PyInit__C(void) {
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr};
  PyObject* module = PyModule_Create(&definition);
  const char* capability = yoso::kCapabilityNames[static_cast<int>(yoso::cpu_capability())];
  if (module == nullptr || PyModule_AddStringConstant(module, "cpu_capability", capability) != 0) return nullptr;
  return module;
}
